"""This machine's processes: each takes one stack of cells after another, on a GPU or on a core.

Cells whose clients can train together make a stack, several processes share a GPU, and cells that
are meant for one core run beside them. A process that dies or fails loses its stack alone, which is
tried again in halves, so that one cell cannot take others with it.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from flrce.core.host import Starter, describe_starter, end_with_parent, start_process
from flrce.core.pieces import FullModel, Recipe, SynchronousPace
from flrce.errors import format_one_line
from flrce.methods.client.workload import PlainTraining
from flrce.methods.selection.power_of_choice import PowerOfChoice
from flrce.methods.selection.tiers import AdaptiveTierSelector
from flrce.simulation import multiprocess, runs
from flrce.simulation.executors import count_cores
from flrce_arena.plan import ArenaCell
from flrce_arena.records import CellRecord, build_cell_record

MAX_BATCH_CELLS = 12  # cells of a stack: more in one process are bound by its Python
MAX_PROCESS_DEATHS = 2  # of processes with the same lone cell before it counts as failed
log = logging.getLogger("flrce")

CellOutcome = tuple[ArenaCell, CellRecord | str]


@dataclass(frozen=True)
class CellBatch:
    """Cells that one process runs at once."""

    cells: tuple[ArenaCell, ...]
    device: str  # cuda: as a stack
    deaths: int = 0

    def split_in_halves(self) -> list["CellBatch"]:
        middle = len(self.cells) // 2
        return [replace(self, cells=part) for part in (self.cells[:middle], self.cells[middle:])]


def build_cell_batches(
    cells: Sequence[ArenaCell], device: Callable[[ArenaCell], str], size: int = MAX_BATCH_CELLS
) -> list[CellBatch]:
    """Stacks of equal size, at most `size`, in the order of their first cells; a cell for the CPU
    is one of its own.
    """
    found: dict[Any, list[int]] = {}
    for i, cell in enumerate(cells):
        found.setdefault(
            (device(cell), batching_key(cell) if device(cell) == "cuda" else i), []
        ).append(i)
    made = []
    for (where, _), members in found.items():
        count = -(-len(members) // size)
        for part in range(count):
            some = members[len(members) * part // count : len(members) * (part + 1) // count]
            made.append((some[0], CellBatch(tuple(cells[i] for i in some), where)))
    return [lot for _, lot in sorted(made, key=lambda pair: pair[0])]


def batching_key(cell: ArenaCell) -> tuple[str, ...]:
    """What cells of one stack share: samples and network, and how clients train."""
    e = cell.experiment
    pool = (
        runs.data_identity(e),
        e.model.model_dump_json(),
        str(e.objective),
        str(e.engine.precision),
    )
    recipe = e.build_recipe()
    return (*pool, f"plain, {recipe.holdouts}" if is_plain_training(recipe) else cell.method)


def is_plain_training(recipe: Recipe) -> bool:
    """Whether clients take SGD's steps on whole models, round by round, and nobody is asked for a
    loss before.
    """
    asks = isinstance(recipe.selector, PowerOfChoice | AdaptiveTierSelector)
    whole = recipe.submodel == FullModel() and not recipe.personal and not recipe.augment
    steady = recipe.pace == SynchronousPace() and not asks
    return (
        whole and steady and type(recipe.trainer) is PlainTraining and len(recipe.chain.links) == 1
    )


def count_processes(waiting: Sequence[CellBatch]) -> dict[str, int]:
    """Processes for each device: a few for a GPU, and the other cores one each."""
    cores = count_cores()
    stacks = sum(lot.device == "cuda" for lot in waiting)
    gpus = 0
    if stacks:
        room = (
            torch.cuda.get_device_properties(0).total_memory // multiprocess.GPU_BYTES_PER_PROCESS
        )
        gpus = max(
            1,
            min(
                stacks,
                cores // 2,
                torch.cuda.device_count() * min(multiprocess.MAX_PROCESSES, room),
            ),
        )
    alone = sum(lot.device == "cpu" for lot in waiting)
    return {"cuda": gpus, "cpu": min(alone, max(cores - gpus, 1))}


def run_cell_batches(
    waiting: Sequence[CellBatch],
    work: Path,
    seats: Mapping[str, int] | None = None,
    stack: str = "cuda",
) -> Iterator[CellOutcome]:
    """Every cell with what came of it, as lots end; `stack`: the device on which stacks really
    run.
    """
    seats = seats or count_processes(waiting)
    queues = {device: [lot for lot in waiting if lot.device == device] for device in seats}
    context = get_context("spawn")  # a forked process cannot use the GPU
    gpus = torch.cuda.device_count() if stack == "cuda" and seats.get("cuda") else 0
    busy: dict[Connection, tuple[Any, CellBatch | None, str, int]] = {}

    def start_worker(device: str, number: int) -> None:
        mine, theirs = context.Pipe()
        gpu = number % gpus if gpus and device == "cuda" else None
        told = (theirs, device, stack, seats[device], gpu, describe_starter(), str(work))
        child = context.Process(target=_serve_cell_batches, args=told)
        start_process(child)  # cells are plain data
        theirs.close()
        busy[mine] = (child, None, device, number)
        send_next_batch(mine)

    def send_next_batch(pipe: Connection) -> None:
        child, _, device, number = busy[pipe]
        if not queues[device]:
            del busy[pipe]
            pipe.close()
            child.join(10)
            return
        lot = queues[device].pop(0)
        busy[pipe] = (child, lot, device, number)
        with suppress(OSError):  # it may have died already: its end is heard next
            pipe.send(lot)

    try:
        for device, count in seats.items():
            for number in range(count):
                start_worker(device, number)
        while busy:
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                child, lot, device, number = busy[pipe]
                assert lot is not None
                try:
                    found: list[CellRecord | str] | str = pipe.recv()
                except (EOFError, OSError):
                    found = f"its process ended ({_wait_for_exit_code(child)})"
                    del busy[pipe]
                    lot = replace(lot, deaths=lot.deaths + 1)
                if isinstance(found, list):
                    yield from zip(lot.cells, found, strict=True)
                elif len(lot.cells) > 1:
                    log.warning(
                        "%d cells together failed (%s): they are tried in halves",
                        len(lot.cells),
                        found,
                    )
                    queues[device][:0] = lot.split_in_halves()
                elif 0 < lot.deaths < MAX_PROCESS_DEATHS:
                    queues[device].insert(0, lot)
                else:
                    yield lot.cells[0], found
                if pipe in busy:
                    send_next_batch(pipe)
                elif queues[device]:
                    start_worker(device, number)
    finally:
        for child, *_ in busy.values():
            child.terminate()
        for child, *_ in busy.values():
            child.join(10)


def _wait_for_exit_code(child: Any) -> int | None:
    child.join(10)
    code: int | None = child.exitcode
    return code


def _serve_cell_batches(
    pipe: Connection,
    device: str,
    stack: str,
    beside: int,
    gpu: int | None,
    parent: Starter,
    work: str,
) -> None:
    """A process's life: lots, until none is left or nobody listens."""
    end_with_parent(parent)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = multiprocess.select_visible_gpu(gpu)
    torch.set_num_threads(1)
    read = runs.make_cached_reader()
    while True:
        try:
            lot = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            found = (
                run_cell_batch(lot, read, stack, beside)
                if device == "cuda"
                else [_run_single_cell(lot.cells[0], work, read)]
            )
        except Exception as why:  # the parent decides; whatever it is, it must not end the others
            pipe.send(format_one_line(why, 200) or type(why).__name__)
            if gpu is not None:
                return  # an error on a GPU may have spoilt all that this process has there
            continue
        pipe.send(found)


def run_cell_batch(lot: CellBatch, read: Any, device: str, beside: int) -> list[CellRecord]:
    jobs = [(cell.experiment, None) for cell in lot.cells]
    found = runs.run_in_process(jobs, device=device, beside=beside, read=read)
    return [
        build_cell_record(cell, result.history)
        for cell, result in zip(lot.cells, found, strict=True)
    ]


def _run_single_cell(cell: ArenaCell, work: str, read: Any) -> CellRecord:
    data = read(cell.experiment)
    result = runs.run(
        cell.experiment, Path(work) / cell.folder, resume=True, data=data, allow_divergence=True
    )
    return build_cell_record(cell, result.history)
