"""Which samples a client trains on, in which order: computed ahead, the same for every engine."""

import numpy as np
from numpy.typing import NDArray

from flrce.core.types import Task
from flrce.rng import make_stream

IndexArray = NDArray[np.int64]


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
