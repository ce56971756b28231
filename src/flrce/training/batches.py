"""Which samples a client trains on, in which order: computed ahead, the same for every engine."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.types import Task
from flrce.models.inputs import scale_inputs
from flrce.rng import make_stream

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as they are stored; a network sees x * scale + shift, token ids as they are."""

    x: Tensor  # (n, ...)
    y: Tensor  # (n, ...) targets
    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, eq=False)
class SampleBatches:
    """The batches that a client trains on: consecutive pieces of `order`, of these `sizes`."""

    samples: Samples
    order: IndexArray  # samples of all batches, concatenated
    sizes: IndexArray

    def iter_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs as the network sees them, and targets."""
        x, y = self.samples.x, self.samples.y
        where = torch.from_numpy(self.order).to(x.device)
        for index in where.split(self.sizes.tolist()) if len(self.sizes) else ():
            # index_select is ten times as fast as x[index]
            inputs = scale_inputs(x.index_select(0, index), self.samples.scale, self.samples.shift)
            yield inputs, y[index]


def compute_batch_sizes(n: int, batch: int, normalised: bool) -> IndexArray:
    """Batch sizes of one epoch; a last batch of one sample is left out where BatchNorm could not
    train on it.
    """
    full, rest = divmod(n, batch)
    sizes = [batch] * full + ([rest] if rest else [])
    if normalised and sizes and sizes[-1] == 1:
        sizes.pop()
    return np.array(sizes, np.int64)


def count_steps(task: Task, epoch: int) -> int:
    """How many batches a task trains on where an epoch has so many."""
    if task.work.steps is None:
        return task.work.epochs * epoch
    return task.work.steps if epoch else 0


def draw_batches(task: Task, n: int, normalised: bool) -> tuple[IndexArray, IndexArray]:
    """(positions 0..n-1 of all batches concatenated, batch sizes); reshuffled every epoch."""
    epoch = compute_batch_sizes(n, task.work.batch, normalised)
    steps = count_steps(task, len(epoch))
    epochs = -(-steps // max(len(epoch), 1))
    rng = make_stream(task.seed, "batches", task.t, task.client)
    order = np.concatenate(
        [rng.permutation(n)[: epoch.sum()] for _ in range(epochs)] or [np.empty(0, np.int64)]
    )
    sizes = np.tile(epoch, epochs)[:steps]
    return order[: sizes.sum()].astype(np.int64), sizes
