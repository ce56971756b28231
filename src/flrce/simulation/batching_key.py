"""Which jobs may be lanes of one stack, and what of each goes into its lane."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.training.client import LINK_STATE_PREFIX, PreparedTask
from flrce.training.update_chain import PlainSGD, UpdateChain, match_plain_sgd

BatchingKey = tuple[
    Any, ...
]  # what lanes of one stack share: rate, first trained block, proximal term, chain of links


def extract_link_state(carry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What links kept, of all that a client keeps."""
    return {
        name.removeprefix(LINK_STATE_PREFIX): value
        for name, value in carry.items()
        if name.startswith(LINK_STATE_PREFIX)
    }


def collect_learning_rates(
    jobs: Sequence[PreparedTask], update: UpdateChain | None
) -> Tensor | list[NDArray[np.float32]]:
    """One rate for each job, or where links may change it within a round, one for each step of
    each.
    """
    if update is None:
        return torch.tensor([sgd_hyperparameters(job).lr for job in jobs])
    return [
        np.array(
            [job.update.compute_step_rate(s, job.local) for s in range(len(job.sizes))], np.float32
        )
        for job in jobs
    ]


def sgd_hyperparameters(job: PreparedTask) -> PlainSGD:
    """The few numbers of plain SGD, as far as an update has them."""
    found = match_plain_sgd(job.update, job.local)
    return found if isinstance(found, PlainSGD) else PlainSGD(job.update.lr)


def batching_key(job: PreparedTask) -> BatchingKey:
    """What this job has in common with those that may be lanes beside it."""
    found = match_plain_sgd(job.update, job.local)
    rate, first = job.part.key[0], job.task.part.first
    if isinstance(found, PlainSGD):
        return (rate, first, (found.mu > 0, found.squared), None)
    return (rate, first, (False, True), job.update)
