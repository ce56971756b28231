"""Runs cells: here, on a Ray cluster, or as Slurm's jobs. Where a cell runs changes nothing but the time.

An executor takes cells and yields each with what came of it, as they end: a Played, or why there is none. Whoever
iterates writes the records, so a worker needs no folder in common with the others; where there is one, a cell that
was interrupted goes on from its last committed round.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flrce import runs
from flrce.arena.machine import Ended, lots, shared
from flrce.arena.plan import Cell
from flrce.arena.records import Played, played
from flrce.errors import BadInput, brief

RETRIES = 3  # of a cell whose worker was lost
MARGIN = 1.5  # of a cell's measured GPU memory, for the next one
POLL = 0.2  # seconds between looks at Slurm's jobs

Executor = Callable[[Sequence[Cell], Path], Iterator[Ended]]


@dataclass(frozen=True)
class Outcome:
    """What a worker sends back."""

    played: Played
    memory: float = 0.0  # share of one GPU that was in use at most; 0: none


def play(cell: Cell, folder: str) -> Outcome:
    """One cell from beginning to end, in a process of any kind."""
    gpu = runs.device_of(cell.experiment) == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    result = runs.run(cell.experiment, folder, resume=True)
    peak = torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory if gpu else 0.0
    return Outcome(played(cell, result.history), peak)


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
        return cell, play(cell, str(work / cell.folder)).played
    except (BadInput, RuntimeError, ValueError, ArithmeticError) as why:
        return cell, brief(why, 200) or type(why).__name__


def on_ray(settings: Mapping[str, Any]) -> Executor:
    """On the cluster that RAY_ADDRESS names, or one that is started here; a cell whose node is lost runs again.

    The first cell has a GPU for itself; the others share one by the memory that it took.
    """

    def execute(cells: Sequence[Cell], work: Path) -> Iterator[Ended]:
        ray = _imported("ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        begun = not ray.is_initialized()
        if begun:
            ray.init(address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False)
        try:
            gpus = ray.cluster_resources().get("GPU", 0)
            remote = ray.remote(max_retries=RETRIES)(play)
            share, waiting = 1.0, list(cells)
            pending: dict[Any, Cell] = {}
            while waiting or pending:
                if waiting and not (gpus and pending and share == 1.0):  # the first is measured alone
                    cell = waiting.pop(0)
                    needs = {"num_cpus": 1, **settings} | ({"num_gpus": share} if gpus else {})
                    pending[remote.options(**needs).remote(cell, str(work / cell.folder))] = cell
                    continue
                for ready in ray.wait(list(pending), num_returns=1)[0]:
                    cell = pending.pop(ready)
                    try:
                        outcome = ray.get(ready)
                    except ray.exceptions.RayError as why:
                        yield cell, brief(why, 200)
                        continue
                    if outcome.memory:
                        share = min(0.99, max(0.02, round(MARGIN * outcome.memory, 2)))
                    yield cell, outcome.played
        finally:
            if begun:
                ray.shutdown()

    return execute


def on_jobs(cluster: str, settings: Mapping[str, Any]) -> Executor:
    """As jobs of submitit: `slurm`, or `local` for processes of this machine; a lost job is sent again."""

    def execute(cells: Sequence[Cell], work: Path) -> Iterator[Ended]:
        submitit = _imported("submitit", "slurm")
        executor = submitit.AutoExecutor(folder=work / "jobs", cluster=cluster)
        executor.update_parameters(**{"timeout_min": 240, **settings})
        pending = {}
        for cell in cells:
            pending[executor.submit(play, cell, str(work / cell.folder))] = (cell, 0)
        while pending:
            ended = [job for job in pending if job.done()]
            for job in ended:
                cell, tries = pending.pop(job)
                if (why := job.exception()) is None:
                    yield cell, job.result().played
                elif isinstance(why, submitit.core.utils.FailedJobError) or tries >= RETRIES:
                    yield cell, brief(why, 200)
                else:
                    pending[executor.submit(play, cell, str(work / cell.folder))] = (cell, tries + 1)
            if not ended:
                time.sleep(POLL)

    return execute


def executor(where: str, settings: Mapping[str, Any]) -> Executor:
    """By name: "here", "ray", "slurm", or "processes" (submitit on this machine)."""
    if where == "here":
        return here
    if where == "ray":
        return on_ray(settings)
    if where in ("slurm", "processes"):
        return on_jobs("slurm" if where == "slurm" else "local", settings)
    raise BadInput(f"--on {where!r}: here, ray, slurm or processes")


def _imported(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError as why:
        raise BadInput(f"{name} is not installed; pip install 'flrce[{extra}]'") from why


def clear(work: Path, cell: Cell) -> None:
    """What a cell left behind while it ran."""
    shutil.rmtree(work / cell.folder, ignore_errors=True)
