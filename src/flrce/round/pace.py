"""When is a round over? Everybody's reply, the fastest, those in time, or the first few of many under way."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flrce.bounds import Amount, Count, Positive, Whole
from flrce.pieces import Recipe
from flrce.types import Flight, Task


@dataclass(frozen=True)
class Fastest:
    """Over-commitment (Bonawitz et al. 2019): `spares` more than P are asked, as a share of P; the P fastest count."""

    spares: Amount = 0.3

    def room(self, P: int, busy: int) -> int:
        return P + math.ceil(self.spares * P - 1e-9)

    def keep(self, P: int) -> int | None:
        return P


@dataclass(frozen=True)
class Deadline:
    """A reply later than so many seconds does not count."""

    seconds: Positive = 60.0

    def room(self, P: int, busy: int) -> int:
        return P

    def keep(self, P: int) -> int | None:
        return None

    def told(self, task: Task) -> Task:
        return replace(task, deadline=min(task.deadline, self.seconds))


@dataclass(frozen=True)
class Sky:
    """Tasks under way when a round ends: from which model each started, and when."""

    # round -> the w that its clients were sent
    bases: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})
    flights: tuple[Any, ...] = field(default=(), metadata={"plain": True})  # one for each task (round/packing.py)
    clock: float = 0.0  # seconds since the run began
    # number -> what was sent along with tasks
    tensors: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


@dataclass(frozen=True)
class Buffered:
    """FedBuff (Nguyen et al. 2022): P clients are always under way; a round ends with the first `size` replies.

    The others go on, from the model they were sent; their replies count when they come, `updates.age` rounds old.
    Replies older than `oldest` rounds are dropped.
    """

    size: Count = 10
    oldest: Whole = 100

    def init(self, M: int, d: int, D: int) -> Sky:
        return Sky()

    def objection(self, recipe: Recipe) -> str:
        if self.size > recipe.P:
            return f"pace.size = {self.size}: at most per_round = {recipe.P} replies are ever under way; lower it"
        return ""

    def room(self, P: int, busy: int) -> int:
        return P - busy

    def keep(self, P: int) -> int | None:
        return None


def due(flights: Sequence[Flight], size: int) -> tuple[list[Flight], list[Flight]]:
    """(the first `size` to come back, the others); ties by name."""
    first = heapq.nsmallest(size, flights, key=lambda flight: (flight.due, flight.task.client))
    gone = set(map(id, first))
    return first, [flight for flight in flights if id(flight) not in gone]
