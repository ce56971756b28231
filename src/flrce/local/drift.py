"""FedCOMGATE's gradient correction (Haddadpour et al. 2021), the client's half of it.

A client keeps delta_k and descends along g - delta_k; after a round of tau steps,
delta_k += ((w - w_k) / lr - mean q) / tau. The round's mean q is known once all have replied, so it arrives with the
client's next task and is settled then.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from flrce.types import Task

ROUND, MEAN = "drift.round", "drift.mean"  # in a task: a round and its mean q; 0 before the client's first
DELTA, OWN, STEPS = "drift.delta", "drift.own", "drift.steps"  # with the client


def settled(task: Task, carry: Mapping[str, Tensor], size: int) -> Tensor | None:
    """delta_k (size,) as of this round, or None where the task asks for no correction.

    The mean of a round in which the client's reply did not count never comes; what it kept of that round lapses.
    """
    if ROUND not in task.tensors:
        return None
    delta = carry.get(DELTA, torch.zeros(size))
    if MEAN in task.tensors and ROUND in carry and torch.equal(carry[ROUND], task.tensors[ROUND]):
        delta = delta + carry[OWN] - task.tensors[MEAN] / float(carry[STEPS])
    return delta


def kept(task: Task, delta: Tensor, u: Tensor, steps: int) -> dict[str, Tensor]:
    """What the client keeps until the mean is known; u (size,) = w_k - w."""
    own = -u / (task.lr * steps)
    return {DELTA: delta, OWN: own, ROUND: torch.tensor([task.t]), STEPS: torch.tensor([float(steps)])}
