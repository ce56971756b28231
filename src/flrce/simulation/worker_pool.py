"""Workers of the simulator: processes with one thread each, or threads where the work leaves
Python.

Jobs are independent and results come back in the order of the jobs, so their number never shows in
a result.
"""

import ctypes
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from flrce.core.host import choose_start_method
from flrce.core.process_lifetime import Starter, describe_starter, end_with_parent

WorkerJob = tuple[Any, ...]
WorkFunction = Callable[..., Any]
BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM}
WORKER_EXIT_SECONDS = 5.0  # seconds for a worker to end by itself
# seconds between two looks whether a silent worker was stopped: twice in a row, and it is replaced
STOPPED_CHECK_SECONDS = 5.0


class WorkerFailure(RuntimeError):
    """Every worker that had this job died."""


class WorkerThreads:
    """For work that releases the interpreter lock."""

    def __init__(self, work: WorkFunction, count: int) -> None:
        self.work, self.pool = work, ThreadPoolExecutor(count)

    def run(self, jobs: Sequence[WorkerJob], tries: int = 2) -> list[Any]:
        return list(self.pool.map(lambda job: self.work(*job), jobs))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class WorkerProcesses:
    """Workers with a pipe each. One that dies is replaced and its job given out anew, until the job
    is `WorkerFailure`.
    """

    def __init__(self, work: WorkFunction, count: int) -> None:
        self.work, self.exit_code = work, 0
        self.context: Any = get_context(choose_start_method())
        self.workers: list[tuple[Any, Connection]] = []
        for _ in range(count):
            self.workers.append(self._start_worker())

    def run(self, jobs: Sequence[WorkerJob], tries: int = 2) -> list[Any]:
        results: list[Any] = [None] * len(jobs)
        todo, died = list(range(len(jobs)))[::-1], [0] * len(jobs)
        busy: dict[int, int] = {}  # worker -> job
        stopped: set[int] = set()  # workers found so at the last look
        while todo or busy:
            for slot in range(len(self.workers)):
                if todo and slot not in busy:
                    busy[slot] = todo.pop()
                    self._send_job(slot, jobs[busy[slot]])
            ready = wait([self.workers[slot][1] for slot in busy], STOPPED_CHECK_SECONDS)
            if not ready:
                stopped = self._kill_stopped_workers(
                    stopped, [slot for slot in busy if _is_stopped(self.workers[slot][0].pid)]
                )
            for slot in [slot for slot in busy if self.workers[slot][1] in ready]:
                job = busy.pop(slot)
                try:
                    # our own worker's bytes
                    results[job] = pickle.loads(self.workers[slot][1].recv_bytes())
                except (EOFError, OSError):
                    self._replace_worker(slot)
                    died[job] += 1
                    if died[job] < tries:
                        todo.append(job)
                    else:
                        times = "twice" if tries == 2 else f"{tries} times"
                        results[job] = WorkerFailure(
                            f"its worker died {times} (exit code {self.exit_code})"
                        )
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WorkerFailure):
                raise result
        return results

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.terminate()
        for process, _ in self.workers:
            _join_or_kill(process)

    def _kill_stopped_workers(self, before: set[int], now: list[int]) -> set[int]:
        """Kill workers that somebody stopped (SIGSTOP) and did not wake: their jobs go to
        others.
        """
        for slot in before.intersection(now):
            self.workers[slot][0].kill()
        return set(now)

    def _start_worker(self) -> tuple[Any, Connection]:
        here, there = self.context.Pipe()
        # a forked child has the parent's ends of all pipes as well
        forked = self.context.get_start_method() == "fork"
        inherited = [here, *(pipe for _, pipe in self.workers)] if forked else []
        told = (self.work, there, describe_starter(), inherited)
        process = self.context.Process(target=_serve_jobs, args=told, daemon=True)
        # a signal between the fork and _serve would raise in the child as if it were the parent: it
        # waits
        before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()
        return process, here

    def _send_job(self, slot: int, job: WorkerJob) -> None:
        with suppress(OSError):  # it is dead: its pipe reads as closed, and run() replaces it
            self.workers[slot][1].send_bytes(pickle.dumps(job))

    def _replace_worker(self, slot: int) -> None:
        process, pipe = self.workers[slot]
        pipe.close()
        _join_or_kill(process)
        self.exit_code = process.exitcode
        self.workers[slot] = self._start_worker()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, where the system tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def _join_or_kill(process: Any) -> None:
    """Wait for a worker's end; one that is stuck or stopped does not heed SIGTERM."""
    process.join(WORKER_EXIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()


def _retain_freed_memory() -> None:
    """Keep freed memory: tensors of a step would else be given back to the system and faulted in
    anew.
    """
    with suppress(OSError, AttributeError):  # only glibc has it
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, as high as older versions allow
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _serve_jobs(
    work: WorkFunction, pipe: Connection, parent: Starter, inherited: Sequence[Connection]
) -> None:
    """A worker's life: one thread, one job at a time, until the parent goes away.

    `inherited` are the parent's ends of pipes. A worker that kept its own would wait for ever for
    the rest of a job, or for somebody to read its result, once the parent is dead.
    """
    end_with_parent(parent)
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)
    torch.set_num_threads(1)
    _retain_freed_memory()
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            result = work(*job)
        except Exception as why:
            # where it was raised does not travel by itself
            why.add_note(f"in a worker:\n{traceback.format_exc()}")
            result = why
        try:
            pipe.send_bytes(pickle.dumps(result))
        except OSError:
            return  # nobody is left to read it
