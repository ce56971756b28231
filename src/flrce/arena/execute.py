"""Runs cells: here, on a Ray cluster, or as Slurm's jobs. Where a cell runs changes nothing but the time.

An executor takes cells and yields each with what came of it, as they end: a Played, or why there is none. Whoever
iterates writes the records, so a worker needs no folder in common with the others; where there is one, a cell that
was interrupted goes on from its last committed round.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flrce import runs
from flrce.arena.away import Call, Lost, away
from flrce.arena.machine import Ended, lots, shared
from flrce.arena.plan import Cell
from flrce.arena.records import Played, played
from flrce.errors import BadInput, brief

Executor = Callable[[Sequence[Cell], Path], Iterator[Ended]]


def play(cell: Cell, folder: str) -> Played:
    """One cell from beginning to end, in a process of any kind."""
    return played(cell, runs.run(cell.experiment, folder, resume=True, allow_divergence=True).history)


def here(cells: Sequence[Cell], work: Path) -> Iterator[Ended]:
    """On this machine: stacks where there is a GPU and cells that ask for one core, by several processes; then others,
    each with all cores, in this one."""
    many = [cell for cell in cells if _place(cell)]
    yield from shared(lots(many, _place), work)
    for cell in cells:
        if not _place(cell):
            yield _tried(cell, work)


def _place(cell: Cell) -> str:
    """Where a cell runs beside others; "" where it has the machine for itself."""
    engine = cell.experiment.engine
    if engine.name == "flower":
        return ""
    if runs.device_of(cell.experiment) == "cuda":
        return "cuda"
    return "cpu" if engine.workers == 1 else ""


def _tried(cell: Cell, work: Path) -> Ended:
    try:
        return cell, play(cell, str(work / cell.folder))
    except (BadInput, RuntimeError, ValueError, ArithmeticError) as why:
        return cell, brief(why, 200) or type(why).__name__


def executor(where: str, settings: Mapping[str, Any]) -> Executor:
    """By name: "here", or one of away's places."""
    if where == "here":
        return here
    send = away(where, settings)

    def execute(cells: Sequence[Cell], work: Path) -> Iterator[Ended]:
        calls = [Call(play, (cell, str(work / cell.folder))) for cell in cells]
        for i, found in send(calls, work):
            yield cells[i], found.why if isinstance(found, Lost) else found

    return execute


def clear(work: Path, cell: Cell) -> None:
    """What a cell left behind while it ran."""
    shutil.rmtree(work / cell.folder, ignore_errors=True)
