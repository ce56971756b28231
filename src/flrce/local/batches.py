"""Which samples a client trains on, in which order: computed ahead, the same for every engine."""

import numpy as np
from numpy.typing import NDArray

from flrce.rng import stream
from flrce.types import Task

Index = NDArray[np.int64]


def sizes_of(n: int, batch: int, normalised: bool) -> Index:
    """Batch sizes of one epoch; a last batch of one sample is left out where BatchNorm could not train on it."""
    full, rest = divmod(n, batch)
    sizes = [batch] * full + ([rest] if rest else [])
    if normalised and sizes and sizes[-1] == 1:
        sizes.pop()
    return np.array(sizes, np.int64)


def steps_of(task: Task, epoch: int) -> int:
    """How many batches a task trains on where an epoch has so many."""
    if task.work.steps is None:
        return task.work.epochs * epoch
    return task.work.steps if epoch else 0


def batches(task: Task, n: int, normalised: bool) -> tuple[Index, Index]:
    """(positions 0..n-1 of all batches concatenated, batch sizes); reshuffled every epoch."""
    epoch = sizes_of(n, task.work.batch, normalised)
    steps = steps_of(task, len(epoch))
    epochs = -(-steps // max(len(epoch), 1))
    rng = stream(task.seed, "batches", task.t, task.client)
    order = np.concatenate([rng.permutation(n)[: epoch.sum()] for _ in range(epochs)] or [np.empty(0, np.int64)])
    sizes = np.tile(epoch, epochs)[:steps]
    return order[: sizes.sum()].astype(np.int64), sizes
