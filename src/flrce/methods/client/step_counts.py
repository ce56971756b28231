"""What a client keeps of a round whose reply may not have counted: its next task says, and settles
it.

A client that was too late has moved on, the server has not: what both sides sum up would drift
apart. So a client keeps a vector as it was before and after its last round, and a task names the
client's last round that counted.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flrce.core.types import RoundEvent, Task
from flrce.training.links import Tensors

ROUND, AFTER = "counted.round", ".after"


@dataclass(frozen=True)
class CountedRoundsState:
    """The round of each client's last task whose reply counted; 0: none."""

    last: Tensor = field(metadata={"rows": "trained"})  # (M,)


def add_counted_round(task: Task, last: Tensor, **tensors: Tensor) -> Task:
    """The task with its client's last round that counted, and further tensors by name."""
    return replace(
        task, tensors={**task.tensors, ROUND: last[task.k : task.k + 1].clone(), **tensors}
    )


def update_counted_rounds(last: Tensor, event: RoundEvent) -> Tensor:
    """(M,) after a round's replies counted: each stands for the round in which its client was sent
    its task.
    """
    updates, after = event.updates, last.clone()
    after[updates.k] = event.t if updates.age is None else event.t - updates.age
    return after


def resolve_client_vector(name: str, task: Task, client_state: Tensors, w: Tensor) -> Tensor:
    """The client's vector as of its last round that counted; 0 before there was one."""
    now = task.tensors.get(ROUND)
    counted = (
        now is not None
        and ROUND in client_state
        and torch.equal(client_state[ROUND].cpu(), now.cpu())
    )
    kept = client_state.get(name + AFTER if counted else name)
    return torch.zeros_like(w) if kept is None else kept.to(w)


def pack_client_vector(name: str, before: Tensor, after: Tensor, t: Tensor) -> dict[str, Tensor]:
    """What stays with the client after round t."""
    return {name: before.cpu(), name + AFTER: after.cpu(), ROUND: t}
