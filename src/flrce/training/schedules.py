"""How the rate changes: a factor from (step of the round from 0, steps of the round, round t from
1, rounds T).
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from flrce.errors import BadInput

Proportion = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]


@runtime_checkable
class Schedule(Protocol):
    """A factor of the rate. T is 0 where nobody knows when the run will end."""

    def __call__(self, step: int, steps: int, t: int, T: int) -> float: ...


@dataclass(frozen=True)
class ConstantRate:
    def __call__(self, step: int, steps: int, t: int, T: int) -> float:
        return 1.0


@dataclass(frozen=True)
class StepDecay:
    """`factor` times the rate after every `every` rounds (or steps of a round)."""

    every: PositiveInt = 30
    factor: Proportion = 0.1
    over: Literal["run", "round"] = "run"

    def __call__(self, step: int, steps: int, t: int, T: int) -> float:
        return float(self.factor ** ((t - 1 if self.over == "run" else step) // self.every))


@dataclass(frozen=True)
class RoundDecay:
    """`factor` times the rate each round."""

    factor: Proportion = 0.99

    def __call__(self, step: int, steps: int, t: int, T: int) -> float:
        return float(self.factor ** (t - 1))


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from 1 down to `floor`, over the run's rounds or over the steps of each
    round.
    """

    floor: Proportion = 0.0
    over: Literal["run", "round"] = "run"

    def __call__(self, step: int, steps: int, t: int, T: int) -> float:
        if self.over == "run" and not T:
            raise BadInput(
                "schedule cosine over the run needs to know how many rounds there are; use over ="
                " 'round'"
            )
        done, whole = (t - 1, T) if self.over == "run" else (step, steps)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done / max(whole, 1))) / 2


@dataclass(frozen=True)
class WarmUp:
    """From 1/`rounds` of the rate up to all of it within the first rounds; then as `then` says,
    times that.
    """

    rounds: PositiveInt = 5
    then: Any = field(default=ConstantRate(), metadata={"piece": "schedule"})

    def __call__(self, step: int, steps: int, t: int, T: int) -> float:
        return min(t / self.rounds, 1.0) * float(self.then(step, steps, t, T))
