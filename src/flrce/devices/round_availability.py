"""Availability by round, as version 0.1 had it: callables of (seed, client, round) that say yes or
no. `RoundAvailability` makes a model by the second of them.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from flrce.core.bounds import PositiveInt
from flrce.rng import make_stream


@dataclass(frozen=True)
class RandomRoundAvailability:
    """Everyone is available in a `share` of the rounds, at random."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __call__(self, seed: int, client: str, t: int) -> bool:
        return bool(make_stream(seed, "available", t, client).random() < self.share)


@dataclass(frozen=True)
class DailyRoundAvailability:
    """Everyone is available for the first `awake` rounds of a day of `day` rounds, each from an
    hour of its own on.
    """

    day: PositiveInt = 24
    awake: PositiveInt = 8

    def __call__(self, seed: int, client: str, t: int) -> bool:
        rises = int(make_stream(seed, "rises", 0, client).integers(self.day))
        return (t - 1 - rises) % self.day < self.awake
