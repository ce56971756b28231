"""Slower devices freeze more of the first layers: FedOLF (Niu et al. 2025)."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from annotated_types import Len
from torch import Tensor

from flrce.core.bounds import NonNegativeInt
from flrce.core.roles import LocalTrainer, RoundView
from flrce.core.types import ClientCost, RoundEvent, Task
from flrce.errors import BadInput
from flrce.methods.client.workload import with_frozen_blocks


@dataclass(frozen=True)
class DeviceSpeedState:
    """How fast each client computed in its last round that counted."""

    speed: Tensor = field(metadata={"rows": "trained"})  # (M,) FLOP/s; 0: not known yet


@dataclass(frozen=True)
class OrderedFreezing(LocalTrainer):
    """Devices are ranked by speed and divided into groups of one size, the fastest first; group i
    freezes the first `frozen[i]` blocks.

    Frozen blocks are neither trained nor uploaded, no gradients pass through them, and a block is
    averaged over the clients that trained it. The last block always trains. A device's speed is its
    modelled FLOP/s; it is ranked among this round's clients and all that have trained. One of
    unknown speed freezes nothing, and nothing is frozen in a network that is no chain of layers.
    """

    frozen: Annotated[tuple[NonNegativeInt, ...], Len(1)] = (0, 1, 2)
    partial: ClassVar[bool] = True  # a reply may cover only some coordinates
    changes_coordinates: ClassVar[bool] = True  # and others in a later round

    def __post_init__(self) -> None:
        frozen = tuple(self.frozen)  # experiment files have lists
        object.__setattr__(self, "frozen", frozen)
        if not frozen or any(type(count) is not int or count < 0 for count in frozen):
            raise BadInput(
                f"frozen = {list(frozen)!r}: must be numbers of blocks from 0, one for each group"
                " of devices, the fastest first, such as [0, 1, 2]"
            )

    def initial_state(self, M: int, d: int, D: int) -> DeviceSpeedState:
        return DeviceSpeedState(torch.zeros(M, dtype=torch.float64))

    def observe(self, state: DeviceSpeedState, event: RoundEvent) -> DeviceSpeedState:
        speed = state.speed.clone()
        for k, spent in zip(event.updates.k.tolist(), event.updates.spent, strict=False):
            speed[k] = compute_speed(spent) or speed[k]
        return DeviceSpeedState(speed)

    def assign(self, tasks: list[Task], state: DeviceSpeedState, view: RoundView) -> list[Task]:
        if view.blocks < 2:
            return tasks
        here = {task.k: compute_speed(view.estimate(task)) for task in tasks}
        speeds = dict(enumerate(state.speed.tolist())) | {k: v for k, v in here.items() if v}
        fleet = sorted((v for v in speeds.values() if v), reverse=True)
        return [self._freeze(task, here[task.k], fleet, view.blocks) for task in tasks]

    def _freeze(self, task: Task, speed: float, fleet: list[float], blocks: int) -> Task:
        """The task with what its device's group freezes; `fleet`: speeds, the fastest first."""
        if not speed:
            return task
        faster = bisect_left(fleet, -speed, key=lambda v: -v)  # devices that are strictly faster
        group = faster * len(self.frozen) // len(fleet)
        return with_frozen_blocks(task, min(self.frozen[group], blocks - 1))


def compute_speed(cost: ClientCost) -> float:
    """FLOP/s of a task; 0: not known."""
    return cost.flops / cost.compute_seconds if cost.compute_seconds > 0 else 0.0
