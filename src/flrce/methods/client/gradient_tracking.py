"""FedCOMGATE's gradient correction (Haddadpour et al. 2021), the client's half of it.

A client keeps delta_k and descends along g - delta_k; after a round of tau steps, delta_k += ((w -
w_k) / lr - mean q) / tau. The round's mean q is known once all have replied, so it arrives with the
client's next task and is settled then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flrce.core.types import Task
from flrce.training.links import ClientContext, Link

# in a task: a round and its mean q; 0 before the client's first
ROUND, MEAN = ("drift.round", "drift.mean")
DELTA, OWN, STEPS = "delta", "own", "steps"  # with the client, beside the round's number
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class GradientCorrection(Link):
    """g - delta_k; what the client needs to settle delta_k next time stays with it."""

    supports_client_batches: ClassVar[bool] = True

    def begin_round(self, w: Tensor, local: ClientContext, client_state: Tensors) -> Tensors:
        told, task = torch.tensor([local.task.t]), local.task
        length = torch.tensor(
            [task.update.lr * local.steps, float(local.steps)], dtype=torch.float64
        )
        return {
            DELTA: resolve_gradient_correction(task, client_state, len(w)).to(w),
            "start": w.clone(),
            ROUND: told,
            "length": length,
        }

    def step(self, g: Tensor, w: Tensor, state: Tensors) -> tuple[Tensor, Tensors]:
        return g - state[DELTA], state

    def end_round(self, w: Tensor, state: Tensors) -> tuple[Tensors, Tensors]:
        far, steps = state["length"].tolist()
        own = -(w - state["start"]) / far
        return {
            DELTA: state[DELTA],
            OWN: own,
            ROUND: state[ROUND],
            STEPS: torch.tensor([steps]),
        }, {}


def resolve_gradient_correction(task: Task, client_state: Tensors, size: int) -> Tensor:
    """delta_k (size,) as of this round.

    The mean of a round in which the client's reply did not count never comes; what it kept of that
    round lapses.
    """
    delta = client_state.get(DELTA, torch.zeros(size))
    if (
        MEAN in task.tensors
        and ROUND in client_state
        and torch.equal(client_state[ROUND], task.tensors[ROUND])
    ):
        delta = delta + client_state[OWN] - task.tensors[MEAN] / float(client_state[STEPS])
    return delta
