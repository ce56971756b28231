"""Trains cells. `execute` is all that a faster engine has to replace: cells in, their run directories filled."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from flrce import runs
from flrce.data import cache
from flrce.data.sources import Source, source
from flrce.errors import BadInput
from flrce.reproduce.plan import Cell, Facts
from flrce.types import Round

Watch = Callable[[Cell, Round], None]
Sources = Callable[[str], Source]  # name -> samples, read once


class Executor(Protocol):
    """Runs every cell to its end in `out / cell.folder`, going on from whatever is committed there."""

    def __call__(self, cells: Sequence[Cell], out: Path, sources: Sources, watch: Watch) -> None: ...


def execute(cells: Sequence[Cell], out: Path, sources: Sources, watch: Watch) -> None:
    """One cell after another on the simulator."""
    for cell in cells:
        runs.run(
            cell.experiment, out / cell.folder, resume=True, data=sources(cell.dataset),
            watch=lambda done, cell=cell: watch(cell, done),  # type: ignore[misc]
        )  # fmt: skip


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
