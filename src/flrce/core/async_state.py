"""Tasks that outlive a round: what is kept of them between rounds, and which come back first."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flrce.core.types import PendingTask


@dataclass(frozen=True)
class AsyncState:
    """Tasks under way when a round ends: from which model each started, and when."""

    # round -> the w that its clients were sent
    bases: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})
    # one for each task (core/state_packing.py); checkpoints have it under this name
    flights: tuple[Any, ...] = field(default=(), metadata={"plain": True})
    clock: float = 0.0  # seconds since the run began
    # number -> what was sent along with tasks
    tensors: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


def split_due_tasks(
    pending: Sequence[PendingTask], size: int
) -> tuple[list[PendingTask], list[PendingTask]]:
    """(the first `size` to come back, the others); ties by name."""
    first = heapq.nsmallest(size, pending, key=lambda one: (one.due, one.task.client))
    gone = set(map(id, first))
    return first, [one for one in pending if id(one) not in gone]
