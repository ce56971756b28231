"""A pace that puts rounds off to hours of clean electricity."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flrce.bounds import Count, Part, Positive
from flrce.pieces import Synchronous
from flrce.traits import Buffers, Tells
from flrce.types import Task

HOUR = 3600.0


@dataclass(frozen=True)
class CleanHours:
    """A round begins in one of the cleanest hours to come: a `share` of the next `look`, by the fleet's mean intensity.

    It is put off by `within` seconds at most, and after second `deadline` of the run's clock not at all. What goes on
    in a round is up to the `pace` inside. Without a grid (`fleet.carbon`) nothing is put off.
    """

    share: Part = 0.25
    within: Positive = 12 * HOUR
    deadline: Positive = 1e18
    look: Count = 24
    pace: Any = field(default=Synchronous(), metadata={"piece": True})

    def __post_init__(self) -> None:
        if isinstance(self.pace, Buffers):
            raise ValueError("tasks that outlive a round cannot wait for clean hours; take another pace inside")

    def room(self, P: int, busy: int) -> int:
        return int(self.pace.room(P, busy))

    def keep(self, P: int) -> int | None:
        found: int | None = self.pace.keep(P)
        return found

    def told(self, task: Task) -> Task:
        return self.pace.told(task) if isinstance(self.pace, Tells) else task

    def begins(self, now: float, forecast: Sequence[float]) -> float:
        """When the next round begins, given the mean intensity of this hour and those after it."""
        limit = float(np.quantile(np.asarray(forecast), self.share, method="lower"))
        for hour, value in enumerate(forecast):
            later = now + hour * HOUR
            if value <= limit and hour * HOUR <= self.within and (hour == 0 or later <= self.deadline):
                return later
        return now
