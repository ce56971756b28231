"""Which jobs may be lanes of one stack, and what of each goes into its lane."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.local.client import LINKS, Job
from flrce.local.updates import Chain, Simple, simple

Sort = tuple[Any, ...]  # what lanes of one stack share: rate, first trained block, proximal term, chain of links


def links_of(carry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What links kept, of all that a client keeps."""
    return {name.removeprefix(LINKS): value for name, value in carry.items() if name.startswith(LINKS)}


def rates_of(jobs: Sequence[Job], update: Chain | None) -> Tensor | list[NDArray[np.float32]]:
    """One rate for each job, or where links may change it within a round, one for each step of each."""
    if update is None:
        return torch.tensor([few(job).lr for job in jobs])
    return [np.array([job.update.rate(s, job.local) for s in range(len(job.sizes))], np.float32) for job in jobs]


def few(job: Job) -> Simple:
    """The few numbers of plain SGD, as far as an update has them."""
    found = simple(job.update, job.local)
    return found if isinstance(found, Simple) else Simple(job.update.lr)


def sort_of(job: Job) -> Sort:
    """What this job has in common with those that may be lanes beside it."""
    found = simple(job.update, job.local)
    rate, first = job.part.key[0], job.task.part.first
    if isinstance(found, Simple):
        return (rate, first, (found.mu > 0, found.squared), None)
    return (rate, first, (False, True), job.update)
