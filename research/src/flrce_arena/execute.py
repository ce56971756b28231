"""Runs cells: here, on a Ray cluster, or as Slurm's jobs. Where a cell runs changes nothing but the
time.

An executor takes cells and yields each with what came of it, as they end: a Played, or why there is
none. Whoever iterates writes the records, so a worker needs no folder in common with the others;
where there is one, a cell that was interrupted goes on from its last committed round.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch

from flrce.config.experiment import Experiment
from flrce.data.sources import Source
from flrce.errors import BadInput, format_one_line
from flrce.simulation import multiprocess, runs
from flrce.simulation.executors import LostCall, RemoteCall, count_workers, get_remote_executor
from flrce_arena.machine import MAX_BATCH_CELLS, CellBatch, build_cell_batches, count_processes
from flrce_arena.plan import ArenaCell
from flrce_arena.records import CellRecord, build_cell_record

log = logging.getLogger("flrce")
CellOutcome = tuple[ArenaCell, CellRecord | str]
ArenaExecutor = Callable[[Sequence[ArenaCell], Path], Iterator[CellOutcome]]


@cache
def get_reader() -> Callable[[Experiment], Source]:
    """What reads data, once in a process."""
    return runs.make_cached_reader()


def run_cell(cell: ArenaCell, folder: str) -> CellRecord:
    """One cell from beginning to end, in a process of any kind."""
    experiment = cell.experiment
    data = None if experiment.engine.name == "flower" else get_reader()(experiment)
    how: dict[str, Any] = {"resume": True, "allow_divergence": True, "data": data}
    return build_cell_record(cell, runs.run(experiment, folder, **how).history)


def run_cells_here(cells: Sequence[ArenaCell], work: Path) -> Iterator[CellOutcome]:
    """On this machine: stacks where there is a GPU, then cells that ask for one core, each by
    several processes; then others, each with all cores, in this one.
    """
    batches = build_cell_batches([cell for cell in cells if _choose_device(cell)], _choose_device)
    for device, processes in count_processes(batches).items():
        mine = [batch for batch in batches if batch.device == device]
        if mine:
            yield from run_cell_batches(mine, work, processes)
    for cell in cells:
        if not _choose_device(cell):
            yield _try_cell(cell, work)


def run_cell_batches(
    batches: Sequence[CellBatch], work: Path, processes: int
) -> Iterator[CellOutcome]:
    """By processes of this machine; where one ends, its cells are tried alone."""
    send = get_remote_executor("processes", {"parallel": processes})
    gpus = torch.cuda.device_count() if batches[0].device == "cuda" else 0
    more = (str(work), True, processes, gpus)
    calls = [RemoteCall(run_cell_group, (batch.cells, *more)) for batch in batches]
    alone: list[CellBatch] = []
    for i, outcome in send(calls, work):
        cells = batches[i].cells
        if not isinstance(outcome, LostCall):
            yield from zip(cells, outcome, strict=True)
        elif len(cells) == 1:
            yield cells[0], outcome.why
        else:
            log.warning(
                "%d cells together failed (%s): each is tried alone", len(cells), outcome.why
            )
            alone += [CellBatch((cell,), batches[i].device) for cell in cells]
    if alone:
        yield from run_cell_batches(alone, work, processes)


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
    """By name: "here", or one of the places of flrce.simulation.executors."""
    if where == "here":
        return run_cells_here
    send = get_remote_executor(where, settings)

    def execute_remotely(cells: Sequence[ArenaCell], work: Path) -> Iterator[CellOutcome]:
        size = min(MAX_BATCH_CELLS, -(-len(cells) // count_workers(where, settings)))
        groups = build_cell_batches(cells, _choose_remote_device, size)
        calls = [
            RemoteCall(run_cell_group, (group.cells, str(work), where != "slurm"))
            for group in groups
        ]
        for i, outcome in send(calls, work):
            if isinstance(outcome, LostCall):
                yield from ((cell, outcome.why) for cell in groups[i].cells)
            else:
                yield from zip(groups[i].cells, outcome, strict=True)

    return execute_remotely


def _choose_remote_device(cell: ArenaCell) -> str:
    """Cells are grouped as for a GPU wherever one may be used: the worker knows what it has."""
    engine = cell.experiment.engine
    return "cpu" if engine.name == "flower" or engine.device == "cpu" else "cuda"


def run_cell_group(
    cells: Sequence[ArenaCell], work: str, one_core: bool = False, beside: int = 1, gpus: int = 0
) -> list[CellRecord | str]:
    """Cells of one task in one worker: one client batch on its GPU, else one after the other.

    With `one_core`, workers share a machine, and each leaves the other cores to the others. So
    many processes `beside` each other share its `gpus`.
    """
    if gpus > 1 and not torch.cuda.is_initialized():  # processes take turns, by their numbers
        number = int(current_process().name.rpartition("-")[2])
        os.environ["CUDA_VISIBLE_DEVICES"] = multiprocess.select_visible_gpu(number % gpus)
    if len(cells) > 1 and all(_choose_device(cell) == "cuda" for cell in cells):
        try:
            return list(run_stack(cells, "cuda", beside))
        except Exception as why:  # one cell of it may be at fault: each is run alone
            text = "%d cells together failed (%s): they are run one by one"
            log.warning(text, len(cells), format_one_line(why, 200))
    if one_core:
        torch.set_num_threads(1)
        cells = [_limit_to_one_core(cell) for cell in cells]
    return [_try_cell(cell, Path(work))[1] for cell in cells]


def run_stack(cells: Sequence[ArenaCell], device: str, beside: int = 1) -> list[CellRecord]:
    """Cells whose clients train together on a device."""
    jobs = [(cell.experiment, None) for cell in cells]
    results = runs.run_in_process(jobs, device=device, beside=beside, read=get_reader())
    return [build_cell_record(c, result.history) for c, result in zip(cells, results, strict=True)]


def _limit_to_one_core(cell: ArenaCell) -> ArenaCell:
    engine = cell.experiment.engine
    if engine.workers != "auto" or engine.name == "flower":
        return cell
    alone = {**engine.model_dump(exclude_none=True), "workers": 1}
    return replace(cell, experiment=cell.experiment.with_tables({"engine": alone}))


def remove_cell_folder(work: Path, cell: ArenaCell) -> None:
    """What a cell left behind while it ran."""
    shutil.rmtree(work / cell.folder, ignore_errors=True)
