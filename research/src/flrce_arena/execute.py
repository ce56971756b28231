"""Runs cells: here, on a Ray cluster, or as Slurm's jobs. Where a cell runs changes nothing but the
time.

An executor takes cells and yields each with what came of it, as they end: a Played, or why there is
none. Whoever iterates writes the records, so a worker needs no folder in common with the others;
where there is one, a cell that was interrupted goes on from its last committed round.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_one_line
from flrce.simulation import runs
from flrce.simulation.executors import LostCall, RemoteCall, get_remote_executor
from flrce_arena.machine import CellOutcome, build_cell_batches, run_cell_batches
from flrce_arena.plan import ArenaCell
from flrce_arena.records import CellRecord, build_cell_record

ArenaExecutor = Callable[[Sequence[ArenaCell], Path], Iterator[CellOutcome]]


def run_cell(cell: ArenaCell, folder: str) -> CellRecord:
    """One cell from beginning to end, in a process of any kind."""
    return build_cell_record(
        cell, runs.run(cell.experiment, folder, resume=True, allow_divergence=True).history
    )


def run_cells_here(cells: Sequence[ArenaCell], work: Path) -> Iterator[CellOutcome]:
    """On this machine: stacks where there is a GPU and cells that ask for one core, by several
    processes; then others, each with all cores, in this one.
    """
    many = [cell for cell in cells if _choose_device(cell)]
    yield from run_cell_batches(build_cell_batches(many, _choose_device), work)
    for cell in cells:
        if not _choose_device(cell):
            yield _try_cell(cell, work)


def _choose_device(cell: ArenaCell) -> str:
    """Where a cell runs beside others; "" where it has the machine for itself."""
    engine = cell.experiment.engine
    if engine.name == "flower":
        return ""
    if runs.choose_device(cell.experiment) == "cuda":
        return "cuda"
    return "cpu" if engine.workers == 1 else ""


def _try_cell(cell: ArenaCell, work: Path) -> CellOutcome:
    try:
        return cell, run_cell(cell, str(work / cell.folder))
    except (BadInput, RuntimeError, ValueError, ArithmeticError) as why:
        return cell, format_one_line(why, 200) or type(why).__name__


def get_executor(where: str, settings: Mapping[str, Any]) -> ArenaExecutor:
    """By name: "here", or one of away's places."""
    if where == "here":
        return run_cells_here
    send = get_remote_executor(where, settings)

    def execute_remotely(cells: Sequence[ArenaCell], work: Path) -> Iterator[CellOutcome]:
        calls = [RemoteCall(run_cell, (cell, str(work / cell.folder))) for cell in cells]
        for i, found in send(calls, work):
            yield cells[i], found.why if isinstance(found, LostCall) else found

    return execute_remotely


def remove_cell_folder(work: Path, cell: ArenaCell) -> None:
    """What a cell left behind while it ran."""
    shutil.rmtree(work / cell.folder, ignore_errors=True)
