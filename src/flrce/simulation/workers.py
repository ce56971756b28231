"""Who does the simulated clients' work: fused kernels in threads, torch in processes, or one stack
on a GPU.

All three do the same work on the same batches and give results in the order they were asked for, so
neither their number nor their timing shows. Kinds differ in the last bits, as torch's own backends
do.
"""

import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.memory_limits import estimate_worker_bytes
from flrce.core.payload_bytes import count_value_bytes
from flrce.core.types import Reply, Task
from flrce.errors import BadInput, UnfinishedRun
from flrce.models.inputs import scale_inputs
from flrce.simulation.worker_pool import WorkerFailure, WorkerProcesses, WorkerThreads
from flrce.training.client import ClientRunner, IndexArray
from flrce.training.cpu import explain_no_kernel
from flrce.training.cpu.cells import has_compiled_steps
from flrce.training.cpu.shares import count_attention_bytes
from flrce.training.cpu.shortcuts import find_widest_layer

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
    each = estimate_worker_bytes(runner.layout.size, _count_attention_bytes(runner, task))
    few = count if left is None else max(1, min(count, left // each))
    return PooledWorkers(runner, few, name, each)


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
    more = (
        ["GRU layers by compiled steps"]
        if any(has_compiled_steps(layer) for layer in runner.net.modules())
        else []
    )
    more += ["wide layers by compiled code"] if find_widest_layer(runner.net) else []
    log.warning(
        "using the PyTorch trainer%s: %s", f" with {' and '.join(more)}" if more else "", why
    )
    return "torch"


def _count_attention_bytes(runner: ClientRunner, task: Task | None) -> int:
    """Bytes that a batch's attention keeps where it goes by compiled code."""
    if task is None or not runner.compiled or not find_widest_layer(runner.net):
        return 0
    return task.work.batch * count_attention_bytes(
        runner.net, scale_inputs(runner.x[:2], runner.scale, runner.shift)
    )
