"""Trains cells. `execute` is all that a faster engine has to replace: cells in, their run directories filled."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from flrce import runs
from flrce.config import Experiment
from flrce.data import cache
from flrce.data.sources import Source, source
from flrce.errors import BadInput
from flrce.results.paper.plan import Cell, Facts
from flrce.store import ledger
from flrce.types import Round

STACK = 96  # cells whose clients are trained together
Watch = Callable[[Cell, Round], None]
Sources = Callable[[str], Source]  # name -> samples, read once


class Executor(Protocol):
    """Runs every cell to its end in `out / cell.folder`, going on from whatever is committed there."""

    def __call__(self, cells: Sequence[Cell], out: Path, sources: Sources, watch: Watch) -> None: ...


def execute(cells: Sequence[Cell], out: Path, sources: Sources, watch: Watch) -> None:
    """All cells, by the GPU where the experiments may use one and there is one, else one after another."""
    if runs.device_of(cells[0].experiment) == "cuda":
        return stacked(cells, out, sources, watch)
    for cell in cells:
        runs.run(
            cell.experiment, out / cell.folder, resume=True, data=sources(cell.dataset),
            watch=lambda done, cell=cell: watch(cell, done),  # type: ignore[misc]
            allow_divergence=True,
        )  # fmt: skip


def stacked(cells: Sequence[Cell], out: Path, sources: Sources, watch: Watch, device: str = "cuda") -> None:
    """Up to STACK cells of a data set as one stack on the GPU; their folders are written when the stack is done."""
    for dataset in dict.fromkeys(cell.dataset for cell in cells):
        mine = [cell for cell in cells if cell.dataset == dataset]
        for at in range(0, len(mine), STACK):
            group = mine[at : at + STACK]
            jobs: list[tuple[Experiment, Path | None]] = [(cell.experiment, None) for cell in group]
            found = runs.run_together(jobs, data=sources, watch=partial(_told, watch, group), device=device)
            for cell, result in zip(group, found, strict=True):
                ledger.keep(out / cell.folder, cell.experiment.toml(), result.history, result.summary)


def _told(watch: Watch, group: Sequence[Cell], i: int, done: Round) -> None:
    watch(group[i], done)


def load(name: str, data: Path | None, verify: bool = True) -> Source:
    """A data set from the folder of prepared sets that --data names, or from the usual one."""
    if name == "digits" or data is None:
        return source(name)
    folder = data / name
    if not folder.is_dir():
        raise BadInput(
            f"--data {data} holds no {name}; run: FLRCE_DATA={data} flrce data prepare {name} --from DIR, "
            "or leave it out of --datasets"
        )
    return cache.load(folder, verify)


def facts_of(name: str, data: Path | None) -> Facts:
    """Sizes only; the samples stay on disk."""
    pool = load(name, data, verify=False)
    return Facts(len(pool.y), len(pool.classes), int(pool.group.max()) + 1 if pool.group is not None else 0)
