"""A pace that puts rounds off to hours of clean electricity."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flrce.core.bounds import PositiveFloat, PositiveInt, PositiveProportion
from flrce.core.pieces import SynchronousPace
from flrce.core.roles import Pace
from flrce.core.types import Task

HOUR_SECONDS = 3600.0


@dataclass(frozen=True)
class CleanHours(Pace):
    """A round begins in one of the cleanest hours to come: a `share` of the next `look`, by the
    fleet's mean intensity.

    It is put off by `within` seconds at most, and after second `deadline` of the run's clock not at
    all. What goes on in a round is up to the `pace` inside. Without a grid (`fleet.carbon`) nothing
    is put off.
    """

    share: PositiveProportion = 0.25
    within: PositiveFloat = 12 * HOUR_SECONDS
    deadline: PositiveFloat = 1e18
    look: PositiveInt = 24
    pace: Pace = field(default=SynchronousPace(), metadata={"piece": True})

    def __post_init__(self) -> None:
        if self.pace.buffer_size is not None:
            raise ValueError(
                "tasks that outlive a round cannot wait for clean hours; take another pace inside"
            )

    @property
    def forecast_hours(self) -> int:
        return self.look

    def cohort_size(self, P: int, busy: int) -> int:
        return self.pace.cohort_size(P, busy)

    def max_replies(self, P: int) -> int | None:
        return self.pace.max_replies(P)

    def with_deadline(self, task: Task) -> Task:
        return self.pace.with_deadline(task)

    def choose_start_time(self, now: float, forecast: Sequence[float]) -> float:
        """When the next round begins, given the mean intensity of this hour and those after it."""
        limit = float(np.quantile(np.asarray(forecast), self.share, method="lower"))
        for hour, value in enumerate(forecast):
            later = now + hour * HOUR_SECONDS
            if (
                value <= limit
                and hour * HOUR_SECONDS <= self.within
                and (hour == 0 or later <= self.deadline)
            ):
                return later
        return now
