"""Who is there: a pure function of (seed, client, round), so that a resumed run meets the same
clients.

A model of one's own is any callable of these three that says yes or no, named in
`fleet.availability`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from flrce.core.bounds import PositiveInt
from flrce.rng import make_stream


@dataclass(frozen=True)
class RandomRoundAvailability:
    """Everyone is there in a `share` of the rounds, at random."""

    share: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __call__(self, seed: int, client: str, t: int) -> bool:
        return bool(make_stream(seed, "available", t, client).random() < self.share)


@dataclass(frozen=True)
class DailyRoundAvailability:
    """Everyone is there for the first `awake` rounds of a day of `day` rounds, each from an hour of
    its own on.
    """

    day: PositiveInt = 24
    awake: PositiveInt = 8

    def __call__(self, seed: int, client: str, t: int) -> bool:
        rises = int(make_stream(seed, "rises", 0, client).integers(self.day))
        return (t - 1 - rises) % self.day < self.awake


ROUND_AVAILABILITY_MODELS: dict[str, Any] = {
    "by-chance": RandomRoundAvailability,
    "daily": DailyRoundAvailability,
}
