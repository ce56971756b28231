"""flrce reproduce table3 --regime quantity --data DIR --out results --seeds 0-4"""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress, TaskID, TimeRemainingColumn

from flrce.cli.options import parse_on_option, parse_seeds
from flrce.cli.targets import prepare_file, prepare_folder
from flrce.config.experiment import Experiment
from flrce.core.types import Round, State
from flrce.errors import BadInput, suggest_name
from flrce_reproduction import paper, plan

if TYPE_CHECKING:
    from flrce_reproduction.execute import CellExecutor

QUICK_SEEDS, PAPER_SEEDS = "0-1", "0-4"


def reproduce_targets(
    target: str,
    out: Path,
    data: Path | None,
    regime: str | None,
    seed_list: str | None,
    datasets: str | None,
    quick: bool,
    again: bool,
    tables_only: bool,
    lr: str | None,
    network: str | None,
    rates: str | None,
    page: Path | None,
    device: str | None,
    where: str,
    as_json: bool,
) -> None:
    """The paper's tables and figures, beside its numbers; goes on where it was interrupted.

    TARGET is table3, table4, fig-accuracy, fig-energy, fig-bandwidth, fig-efficiency, fig-ablation,
    fig-motivation, wide, or all; claims judges what the paper claims, and rates searches learning
    rates by its rule.
    """
    from flrce_reproduction.execute import execute_cells
    from flrce_reproduction.page import fill_page
    from flrce_reproduction.reproduce import reproduce_paper as carry_out

    names = _parse_datasets(datasets, quick)
    request = plan.ReproductionRequest(
        _parse_target(target),
        names,
        (regime,) if regime else plan.REGIMES,
        tuple(parse_seeds(seed_list or (QUICK_SEEDS if quick else PAPER_SEEDS)) or ()),
        plan.QUICK if quick else plan.PAPER,
        _parse_learning_rates(lr),
        _parse_search_rates(rates, target),
        device or "auto",
        1 if quick else "auto",
        _parse_networks(network),
    )
    prepare_folder(out, "--out")
    if page:
        prepare_file(page, "--page")
    if absent := plan.list_missing_methods():
        print(f"not in the catalogue, left out: {', '.join(absent)}", file=sys.stderr)
    try:
        with ReproductionProgress() as bar:
            executor = execute_cells if where == "here" else _build_remote_executor(where, data)
            texts = carry_out(
                request, out, data, again, not tables_only, bar.step, bar.start, executor
            )
    except KeyboardInterrupt:
        print(
            "interrupted; the same command without --again goes on from the last committed round",
            file=sys.stderr,
        )
        raise click.exceptions.Exit(130) from None
    if page:
        fill_page(
            page,
            {
                name: text + _format_image_link(out / f"{name}.svg", page, name)
                for name, text in texts.items()
            },
        )
    if as_json:
        print(json.dumps(texts, indent=1))
        return
    for text in texts.values():
        print(text)
    print(f"written to {out}")


def _build_remote_executor(where: str, data: Path | None) -> "CellExecutor":
    """Cells on other machines, which read the data sets from the same folder as this one."""
    import torch

    from flrce.simulation.executors import get_remote_executor, run_experiments_remotely
    from flrce_reproduction.execute import CellCallback, DatasetLoader, load_dataset

    send = get_remote_executor(*parse_on_option(where))
    folder = None if data is None else data.resolve()

    def execute_remotely(
        cells: Sequence[plan.PaperCell], out: Path, sources: DatasetLoader, watch: CellCallback
    ) -> None:
        jobs = [(cell.experiment, out / cell.folder) for cell in cells]
        readers = [partial(load_dataset, cell.dataset, folder, False) for cell in cells]
        for i, history in run_experiments_remotely(send, jobs, out, readers):
            for record in history[-1:]:
                watch(cells[i], Round(State(record.t, torch.empty(0), {}), record, ()))

    return execute_remotely


def _format_image_link(svg: Path, page: Path, name: str) -> str:
    """A figure's link as the page sees it, if there is a figure."""
    return f"\n![{name}]({os.path.relpath(svg, page.parent)})\n" if svg.is_file() else ""


class ReproductionProgress:
    """Rounds of all cells on a terminal; a line per finished cell in a pipe."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = Progress(
            *Progress.get_default_columns()[:-1], TimeRemainingColumn(), console=console
        )
        self.shown, self.cells, self.done = console.is_terminal, 0, 0
        self.task: TaskID | None = None

    def start(self, cells: int, rounds: int) -> None:
        self.cells = cells
        if self.shown:
            self.live.start()
            self.task = self.live.add_task(f"{cells} cells", total=rounds)

    def step(self, cell: plan.PaperCell, done: Round) -> None:
        T, t = cell.experiment.rounds, done.record.t
        if self.task is not None:
            self.live.update(self.task, advance=1, description=cell.name)
        if t == T or done.record.stop:
            self.done += 1
            accuracy = (
                f"{100 * done.record.accuracy:.1f} %" if done.record.accuracy is not None else "--"
            )
            line = f"[{self.done}/{self.cells}] {cell.name}: {accuracy} after {t} rounds"
            if self.shown:
                self.live.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "ReproductionProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.task is not None:
            self.live.stop()


def _parse_target(target: str) -> tuple[str, ...]:
    if target == "all":
        return (*plan.TARGETS, "claims")
    known = (*plan.TARGETS, "claims", "rates")
    if target not in known:
        raise BadInput(
            f"{target!r} is no table or figure of the paper;"
            f" {suggest_name(target, (*known, 'all'))}"
        )
    return (target,)


def _parse_datasets(text: str | None, quick: bool) -> tuple[str, ...]:
    if quick:
        if text not in (None, "digits"):
            raise BadInput(
                f"--quick runs on the embedded digits only, got --datasets {text}; drop one of them"
            )
        return ("digits",)
    return tuple(dict.fromkeys(_split_list(text))) if text else tuple(paper.PAPER_SETTINGS)


def _parse_learning_rates(text: str | None) -> dict[str, float]:
    """femnist=0.02,speech=0.1 as a table."""
    pairs = {}
    for word in _split_list(text):
        name, _, value = word.partition("=")
        pairs[name] = _parse_learning_rate(value, f"--lr {word!r}")
    return pairs


def _parse_networks(text: str | None) -> dict[str, str]:
    """cifar100=cnn-cifar as a table."""
    found = {}
    for word in _split_list(text):
        name, _, network = word.partition("=")
        if not network:
            raise BadInput(
                f"--network {word!r} names no network; write for example --network"
                " cifar100=cnn-cifar"
            )
        Experiment.from_tables({"model": {"name": network}}, f"--network {word}")
        found[name] = network
    return found


def _parse_search_rates(text: str | None, target: str) -> tuple[float, ...]:
    if text and target != "rates":
        raise BadInput(
            "--rates belongs to `flrce reproduce rates`; set the rates to train with by --lr"
        )
    return tuple(
        dict.fromkeys(_parse_learning_rate(word, f"--rates {word!r}") for word in _split_list(text))
    )


def _parse_learning_rate(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BadInput(
            f"{where} is no learning rate; write for example --lr femnist=0.02 or --rates 0.01,0.1"
        )
    return value


def _split_list(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
