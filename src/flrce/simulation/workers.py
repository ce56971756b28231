"""Who does the simulated clients' work: fused kernels in threads, torch in processes, or one client
batch on a GPU.

All three do the same work on the same batches and give results in the order they were asked for, so
neither their number nor their timing shows. Kinds differ in the last bits, as torch's own backends
do.
"""

import ctypes
import logging
import os
import pickle
import shutil
import signal
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.downlink import HOST
from flrce.core.host import Starter, choose_start_method, describe_starter, end_with_parent
from flrce.core.memory_limits import estimate_worker_bytes
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Reply, Task
from flrce.errors import BadInput, UnfinishedRun
from flrce.models.inputs import scale_inputs
from flrce.training.client import ClientRunner, IndexArray
from flrce.training.cpu import explain_no_kernel
from flrce.training.cpu.compiled_calls import count_attention_bytes, find_widest_layer
from flrce.training.cpu.gru import has_compiled_steps
from flrce.training.objectives import Classification

WorkerJob = tuple[Any, ...]
WorkFunction = Callable[..., Any]
BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM}
WORKER_EXIT_SECONDS = 5.0  # seconds for a worker to end by itself
# seconds between two looks whether a silent worker was stopped: twice in a row, and it is replaced
STOPPED_CHECK_SECONDS = 5.0
SHARED_MEMORY_PATH = "/dev/shm"  # where Linux keeps memory that processes share
EVALUATION_JOB_SAMPLES = 1000  # samples in one job of an evaluation
# workers that may die of one such job: unlike a client's reply, an evaluation cannot be done
# without
MAX_EVALUATION_TRIES = 3
# the client's model, its task, its samples, what it keeps
TaskInputs = tuple[Tensor, Task, IndexArray, Mapping[str, Tensor]]
# "loss" and each metric: (n, ...), a row for each sample
SampleScores = dict[str, NDArray[np.float64]]
log = logging.getLogger("flrce")


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
        arguments = (self.work, there, describe_starter(), inherited)
        process = self.context.Process(target=_serve_jobs, args=arguments, daemon=True)
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


class Workers(ABC):
    """What the simulator asks for."""

    name: str

    @abstractmethod
    def train(self, orders: Sequence[TaskInputs]) -> Sequence[Reply | WorkerFailure]:
        """Replies to these tasks, in their order."""

    @abstractmethod
    def score_samples(
        self, w: Tensor, index: IndexArray, own: Tensor | None = None
    ) -> SampleScores:
        """Numbers for each sample; `own`: what the client that evaluates keeps."""

    def score_models(self, jobs: Sequence[tuple[Tensor, IndexArray]]) -> list[SampleScores]:
        """The same for several models, each on its own samples."""
        return [self.score_samples(w, index) for w, index in jobs]

    @abstractmethod
    def close(self) -> None:
        """End worker processes and threads."""

    @property
    def worker_processes(self) -> tuple[int, int]:
        """Processes on this machine, and bytes that each takes."""
        return 0, 0

    @property
    def code_device(self) -> torch.device:
        """Where many updates or models are encoded at once."""
        return HOST

    @property
    def updates_on_device(self) -> bool:
        """Whether a round's updates stay on a device."""
        return False

    @property
    def device_lock(self) -> AbstractContextManager[Any]:
        """Held while the server works on the device."""
        return nullcontext()

    def remember_device_copy(self, w: Tensor, there: Tensor) -> None:  # noqa: B027
        """Note that `there`, on the device, is the model w on the host."""


class PooledWorkers(Workers):
    """Jobs spread over a pool: worker processes that share the model's memory, or threads."""

    def __init__(self, runner: ClientRunner, count: int, name: str, each: int = 0) -> None:
        self.runner, self.name, self.each = runner, name, each
        self.w = allocate_shared_zeros(runner.layout.size)
        self.pool: Any = (
            WorkerThreads(self._run_job, count)
            if name == "native"
            else WorkerProcesses(self._run_job, count)
        )

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is not forked: all but the workers."""
        return {"runner": self.runner, "name": self.name, "each": self.each, "w": self.w}

    @property
    def workers(self) -> Any:
        """The processes, for whoever wants to watch or kill them."""
        return self.pool.workers

    @property
    def worker_processes(self) -> tuple[int, int]:
        """Processes, and bytes that each takes."""
        return (len(self.workers), self.each) if isinstance(self.pool, WorkerProcesses) else (0, 0)

    def train(self, orders: Sequence[TaskInputs]) -> list[Reply | WorkerFailure]:
        """The replies. The model that most tasks share is in shared memory; other models travel
        with their tasks.
        """
        models = Counter(id(w) for w, *_ in orders)
        shared = models.most_common(1)[0][0] if orders else None
        if orders:
            self.w.copy_(next(w for w, *_ in orders if id(w) == shared))
        jobs = [("train", None if id(w) == shared else w, *rest) for w, *rest in orders]
        longest = sorted(
            range(len(orders)), key=lambda i: -len(orders[i][2]) * orders[i][1].work.epochs
        )
        done = dict(zip(longest, self.pool.run([jobs[i] for i in longest]), strict=True))
        return [done[i] for i in range(len(orders))]

    def score_samples(
        self, w: Tensor, index: IndexArray, own: Tensor | None = None
    ) -> SampleScores:
        self.w.copy_(w)
        chunks = np.split(index, range(EVALUATION_JOB_SAMPLES, len(index), EVALUATION_JOB_SAMPLES))
        results = self.pool.run([("judge", chunk, own) for chunk in chunks], MAX_EVALUATION_TRIES)
        for result in results:
            if isinstance(result, WorkerFailure):
                raise UnfinishedRun(
                    f"evaluation: {result}; what is committed is kept, go on with --resume"
                )
        names = results[0]
        return {
            name: np.concatenate([result[name].double().numpy() for result in results])
            for name in names
        }

    def close(self) -> None:
        self.pool.close()

    def _run_job(self, what: str, *job: Any) -> Any:
        """One job in a worker: a model (None: the shared one), a task, the client's samples and
        what it keeps; or samples to judge.
        """
        if what == "train":
            w, *rest = job
            return self.runner.train(self.w if w is None else w, *rest)
        return self.runner.evaluate(self.w, *job)


def allocate_shared_zeros(size: int) -> Tensor:
    """(size,) zeros in memory that worker processes share; writing to more than there is would kill
    by a signal.
    """
    needed = count_value_bytes(size)
    is_mounted = os.path.isdir(SHARED_MEMORY_PATH)
    free = shutil.disk_usage(SHARED_MEMORY_PATH).free if is_mounted else needed
    if needed > free:
        raise BadInput(
            f"{SHARED_MEMORY_PATH} has {free / 1e6:.1f} MB left, the model needs"
            f" {needed / 1e6:.1f}; make room there"
        )
    made: Tensor = torch.zeros(size).share_memory_()
    return made


def start_workers(
    runner: ClientRunner, kind: str, count: int, task: Task | None = None, left: int | None = None
) -> PooledWorkers:
    """Fused kernels if network, objective and update have them and `kind` allows, else torch in
    processes.

    `task` is like those that will come. Of processes there are fewer, where `left` bytes do not
    hold so many.
    """
    name = _choose_kernel(runner, kind, task)
    if name == "native":
        return PooledWorkers(runner, count, name)
    worker_bytes = estimate_worker_bytes(runner.layout.size, _count_attention_bytes(runner, task))
    fitting = count if left is None else max(1, min(count, left // worker_bytes))
    return PooledWorkers(runner, fitting, name, worker_bytes)


def _choose_kernel(runner: ClientRunner, kind: str, task: Task | None) -> str:
    """What trains, with the runner set to it.

    Where only the update is more than kernels know, these find the gradients of torch's training.
    One line says why there are none at all.
    """
    if kind == "torch":
        return "torch"
    why = runner.explain_unfused_gradients(task) or explain_no_kernel(runner.net, runner.shape)
    if not why:
        runner.native = True
        whole = task is None or not runner.explain_unfused(task, steps=2)
        return "native" if whole else "gradients"
    if kind == "native":
        raise BadInput(f"engine.kernel = 'native': {why}; use auto or torch")
    runner.compiled = True
    reason = (
        ["GRU layers by compiled steps"]
        if any(has_compiled_steps(layer) for layer in runner.net.modules())
        else []
    )
    reason += ["wide layers by compiled code"] if find_widest_layer(runner.net) else []
    # the fast kernels are for classification: for other objectives this is what to expect
    level = logging.WARNING if isinstance(runner.objective, Classification) else logging.INFO
    trainer = f"using the PyTorch trainer{' with ' if reason else ''}{' and '.join(reason)}"
    log.log(level, "%s: %s", trainer, why)
    return "torch"


def _count_attention_bytes(runner: ClientRunner, task: Task | None) -> int:
    """Bytes that a batch's attention keeps where it goes by compiled code."""
    if task is None or not runner.compiled or not find_widest_layer(runner.net):
        return 0
    return task.work.batch * count_attention_bytes(
        runner.net, scale_inputs(runner.x[:2], runner.scale, runner.shift)
    )
