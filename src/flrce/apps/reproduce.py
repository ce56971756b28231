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

from flrce.apps.options import place, seeds
from flrce.apps.targets import prepare_file, prepare_folder
from flrce.config import Experiment
from flrce.errors import BadInput, nearest
from flrce.results.paper import paper, plan
from flrce.types import Round, State

if TYPE_CHECKING:
    from flrce.results.paper.execute import Executor

QUICK_SEEDS, PAPER_SEEDS = "0-1", "0-4"


def reproduce(
    target: str, out: Path, data: Path | None, regime: str | None, seed_list: str | None, datasets: str | None,
    quick: bool, again: bool, tables_only: bool, lr: str | None, network: str | None, rates: str | None,
    page: Path | None, device: str | None, where: str, as_json: bool,
) -> None:  # fmt: skip
    """The paper's tables and figures, beside its numbers; goes on where it was interrupted.

    TARGET is table3, table4, fig-accuracy, fig-energy, fig-bandwidth, fig-efficiency, fig-ablation, fig-motivation, or
    all; claims judges what the paper claims, and rates searches learning rates by its rule.
    """
    from flrce.results.paper.execute import execute
    from flrce.results.paper.page import fill
    from flrce.results.paper.reproduce import reproduce as carry_out

    names = _datasets(datasets, quick)
    request = plan.Request(
        _targets(target), names, (regime,) if regime else plan.REGIMES,
        tuple(seeds(seed_list or (QUICK_SEEDS if quick else PAPER_SEEDS)) or ()),
        plan.QUICK if quick else plan.PAPER, _pairs(lr), _search(rates, target), device or "auto",
        1 if quick else "auto", _networks(network),
    )  # fmt: skip
    prepare_folder(out, "--out")
    if page:
        prepare_file(page, "--page")
    if absent := plan.missing():
        print(f"not in the catalogue, left out: {', '.join(absent)}", file=sys.stderr)
    try:
        with Bar() as bar:
            executor = execute if where == "here" else _elsewhere(where, data)
            texts = carry_out(request, out, data, again, not tables_only, bar.step, bar.begin, executor)
    except KeyboardInterrupt:
        print("interrupted; the same command without --again goes on from the last committed round", file=sys.stderr)
        raise click.exceptions.Exit(130) from None
    if page:
        fill(page, {name: text + _image(out / f"{name}.svg", page, name) for name, text in texts.items()})
    if as_json:
        print(json.dumps(texts, indent=1))
        return
    for text in texts.values():
        print(text)
    print(f"written to {out}")


def _elsewhere(where: str, data: Path | None) -> "Executor":
    """Cells on other machines, which read the data sets from the same folder as this one."""
    import torch

    from flrce.arena.away import away, run_all
    from flrce.results.paper.execute import Sources, Watch, load

    send = away(*place(where))
    folder = None if data is None else data.resolve()

    def execute(cells: Sequence[plan.Cell], out: Path, sources: Sources, watch: Watch) -> None:
        jobs = [(cell.experiment, out / cell.folder) for cell in cells]
        readers = [partial(load, cell.dataset, folder, False) for cell in cells]
        for i, history in run_all(send, jobs, out, readers):
            for record in history[-1:]:
                watch(cells[i], Round(State(record.t, torch.empty(0), {}), record, ()))

    return execute


def _image(svg: Path, page: Path, name: str) -> str:
    """A figure's link as the page sees it, if there is a figure."""
    return f"\n![{name}]({os.path.relpath(svg, page.parent)})\n" if svg.is_file() else ""


class Bar:
    """Rounds of all cells on a terminal; a line per finished cell in a pipe."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.live = Progress(*Progress.get_default_columns()[:-1], TimeRemainingColumn(), console=console)
        self.shown, self.cells, self.done = console.is_terminal, 0, 0
        self.task: TaskID | None = None

    def begin(self, cells: int, rounds: int) -> None:
        self.cells = cells
        if self.shown:
            self.live.start()
            self.task = self.live.add_task(f"{cells} cells", total=rounds)

    def step(self, cell: plan.Cell, done: Round) -> None:
        T, t = cell.experiment.rounds, done.record.t
        if self.task is not None:
            self.live.update(self.task, advance=1, description=cell.name)
        if t == T or done.record.stop:
            self.done += 1
            accuracy = f"{100 * done.record.accuracy:.1f} %" if done.record.accuracy is not None else "--"
            line = f"[{self.done}/{self.cells}] {cell.name}: {accuracy} after {t} rounds"
            if self.shown:
                self.live.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if self.task is not None:
            self.live.stop()


def _targets(target: str) -> tuple[str, ...]:
    if target == "all":
        return (*plan.TARGETS, "claims")
    known = (*plan.TARGETS, "claims", "rates")
    if target not in known:
        raise BadInput(f"{target!r} is no table or figure of the paper; {nearest(target, (*known, 'all'))}")
    return (target,)


def _datasets(text: str | None, quick: bool) -> tuple[str, ...]:
    if quick:
        if text not in (None, "digits"):
            raise BadInput(f"--quick runs on the embedded digits only, got --datasets {text}; drop one of them")
        return ("digits",)
    return tuple(dict.fromkeys(_words(text))) if text else tuple(paper.SETTINGS)


def _pairs(text: str | None) -> dict[str, float]:
    """femnist=0.02,speech=0.1 as a table."""
    pairs = {}
    for word in _words(text):
        name, _, value = word.partition("=")
        pairs[name] = _number(value, f"--lr {word!r}")
    return pairs


def _networks(text: str | None) -> dict[str, str]:
    """cifar100=cnn-cifar as a table."""
    found = {}
    for word in _words(text):
        name, _, network = word.partition("=")
        if not network:
            raise BadInput(f"--network {word!r} names no network; write for example --network cifar100=cnn-cifar")
        Experiment.of({"model": {"name": network}}, f"--network {word}")
        found[name] = network
    return found


def _search(text: str | None, target: str) -> tuple[float, ...]:
    if text and target != "rates":
        raise BadInput("--rates belongs to `flrce reproduce rates`; set the rates to train with by --lr")
    return tuple(dict.fromkeys(_number(word, f"--rates {word!r}") for word in _words(text)))


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise BadInput(f"{where} is no learning rate; write for example --lr femnist=0.02 or --rates 0.01,0.1")
    return value


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
