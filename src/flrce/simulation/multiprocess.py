"""Many runs on the GPUs of one machine, in several processes: one Python cannot keep a large GPU
busy.

Every process takes a share of the jobs and runs it as stacks of its own, on one GPU. Run
directories are written by the process that owns the run, under its lock, exactly as alone; a
process that dies loses nothing that was committed.
"""

import logging
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from flrce.config.experiment import Experiment
from flrce.core.host import Starter, describe_starter, end_with_parent, start_process
from flrce.core.types import Round
from flrce.errors import BadInput, UnfinishedRun
from flrce.simulation.result import Result

RunJobs = Sequence[tuple[Experiment, Path | None]]
JobCallback = Callable[[int, Round], None]
MIN_JOBS_PER_PROCESS = 4  # runs that are worth a process
MAX_PROCESSES = 8  # processes on one GPU
GPU_BYTES_PER_PROCESS = 6 << 30  # bytes of GPU memory a process wants
log = logging.getLogger("flrce")


def count_processes(jobs: RunJobs, device: str) -> int:
    """How many processes share these jobs: by the experiments' engine.workers, or by jobs, cores
    and GPU memory.
    """
    asked = [job.engine.workers for job, _ in jobs if job.engine.workers != "auto"]
    if asked:
        return max(1, min(int(asked[0]), len(jobs)))
    if device != "cuda":
        return 1
    gpus = torch.cuda.device_count()
    cores = (os.cpu_count() or 1) // 2
    room = torch.cuda.get_device_properties(0).total_memory // GPU_BYTES_PER_PROCESS
    return max(1, min(len(jobs) // MIN_JOBS_PER_PROCESS, cores, gpus * min(MAX_PROCESSES, room)))


def is_picklable(*things: Any) -> bool:
    """Whether another process can be given these."""
    try:
        pickle.dumps(things)
    except Exception:  # closures, locks, open files: many kinds
        return False
    return True


def run_shared(
    work: Callable[..., list[Result]],
    jobs: RunJobs,
    resume: bool,
    data: Any,
    watch: JobCallback | None,
    device: str,
    count: int,
) -> list[Result]:
    """The results of all jobs in their order, from `count` processes that `work` on every count-th
    each.
    """
    context = get_context("spawn")  # a forked process cannot use the GPU
    gpus = torch.cuda.device_count() if device == "cuda" else 1
    results: list[Any] = [None] * len(jobs)
    pipes: dict[Connection, tuple[int, Any]] = {}
    try:
        for share in range(count):
            mine, theirs = context.Pipe(duplex=False)
            mates = (share % gpus, count // gpus or 1)
            arguments = pickle.dumps(
                (work, list(jobs[share::count]), resume, data, device, watch is not None, *mates)
            )
            child = context.Process(
                target=_run_process, args=(arguments, theirs, describe_starter())
            )
            start_process(child, arguments)
            theirs.close()
            pipes[mine] = (share, child)
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                _handle_message(pipe, pipes, results, watch, count)
    except BaseException:
        for _, child in pipes.values():
            child.terminate()
        raise
    finally:
        for _, child in pipes.values():
            child.join(10)
    return results


def _handle_message(
    pipe: Connection,
    pipes: dict[Connection, tuple[int, Any]],
    results: list[Any],
    watch: JobCallback | None,
    count: int,
) -> None:
    """One message of a process: a round, its results, or why it ended."""
    share, child = pipes[pipe]
    try:
        kind, value = pickle.loads(pipe.recv_bytes())  # our own process's bytes
    except (EOFError, OSError):
        child.join()
        del pipes[pipe]
        raise UnfinishedRun(
            f"a process with {len(results[share::count])} runs ended ({child.exitcode}); what is"
            " committed is kept, go on with --resume"
        ) from None
    if kind == "round" and watch is not None:
        watch(share + count * value[0], value[1])
    elif kind == "failed":
        raise value
    elif kind == "done":
        results[share::count] = value
        child.join()
        del pipes[pipe]


def _run_process(told: bytes, pipe: Connection, parent: Starter) -> None:
    """A process's life: its share of the jobs, each round told, until it is done or nobody
    listens.
    """
    end_with_parent(parent)
    work, jobs, resume, data, device, watched, gpu, beside = pickle.loads(told)
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = select_visible_gpu(gpu)
    lock = threading.Lock()

    def send_message(what: str, value: Any) -> None:
        with lock:
            pipe.send_bytes(pickle.dumps((what, value)))

    def report_round(i: int, done: Round) -> None:
        small_state = replace(
            done.state, w=torch.empty(0), server_state={}, client_states={}, history=()
        )
        send_message("round", (i, replace(done, state=small_state, model=None)))

    try:
        results = work(jobs, resume, data, report_round if watched else None, device, beside)
        # clients' models may be many
        send_message("done", [replace(result, personal={}) for result in results])
    except (BadInput, UnfinishedRun) as why:
        send_message("failed", why)
    except Exception as why:  # the parent raises it; one that does not travel, by its words
        send_message(
            "failed", why if is_picklable(why) else RuntimeError(f"{type(why).__name__}: {why}")
        )


def select_visible_gpu(gpu: int) -> str:
    """The GPU of this number among those that the user lets be seen."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return seen[gpu] if gpu < len(seen) else str(gpu)
