"""When is a round over? Everybody's reply, the fastest, those in time, or the first few of many
under way.
"""

import math
from dataclasses import dataclass, replace

from flrce.core.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from flrce.core.pending import AsyncState
from flrce.core.pieces import Recipe
from flrce.core.roles import Pace
from flrce.core.types import Task


@dataclass(frozen=True)
class OverCommitment(Pace):
    """Over-commitment (Bonawitz et al. 2019): `spares` more than P are asked, as a share of P; the
    P fastest count.
    """

    spares: NonNegativeFloat = 0.3

    def cohort_size(self, P: int, busy: int) -> int:
        return P + math.ceil(self.spares * P - 1e-9)

    def max_replies(self, P: int) -> int | None:
        return P


@dataclass(frozen=True)
class ReplyDeadline(Pace):
    """A reply later than so many seconds does not count."""

    seconds: PositiveFloat = 60.0

    def cohort_size(self, P: int, busy: int) -> int:
        return P

    def max_replies(self, P: int) -> int | None:
        return None

    def with_deadline(self, task: Task) -> Task:
        return replace(task, deadline=min(task.deadline, self.seconds))


@dataclass(frozen=True)
class BufferedPace(Pace):
    """FedBuff (Nguyen et al. 2022): P clients are always under way; a round ends with the first
    `size` replies.

    The others go on, from the model they were sent; their replies count when they come,
    `updates.age` rounds old. Replies older than `oldest` rounds are dropped.
    """

    size: PositiveInt = 10
    oldest: NonNegativeInt = 100

    @property
    def buffer_size(self) -> int:
        return self.size

    @property
    def max_age(self) -> int:
        return self.oldest

    def initial_state(self, M: int, d: int, D: int) -> AsyncState:
        return AsyncState()

    def check_recipe(self, recipe: Recipe) -> str:
        if self.size > recipe.P:
            return (
                f"pace.size = {self.size}: at most per_round = {recipe.P} replies are ever under"
                " way; lower it"
            )
        return ""

    def cohort_size(self, P: int, busy: int) -> int:
        return P - busy

    def max_replies(self, P: int) -> int | None:
        return None
