"""A stop for skewed labels: enough once rounds undo one another, whatever their clients make of
each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from flrce.core.bounds import NonNegativeInt, PositiveInt, Proportion
from flrce.core.pieces import Recipe
from flrce.core.roles import StopCourse, StopRule
from flrce.core.types import RoundRecord


@dataclass(frozen=True)
class NoHeadway(StopRule):
    """Stop once the mean headway of the last `n` rounds is below `level` + `share` of that of the
    `first` rounds.

    Headway is the cosine between a round's step and the way that the rounds before went
    (averages.py): above 0 while they follow one another, 0 where they wander, below 0 where each
    takes back what the last did. Conflict between rounds, where Algorithm 3 looks at conflict
    within one: clients with few labels each conflict in every round, whether training gets anywhere
    or not. The first rounds tell how much headway there is to lose: the more labels differ between
    clients, the less of it is ever seen. No run ends within `after` rounds
    (research/docs/first-study.md).
    """

    level: Annotated[float, Ge(-1), Le(1)] = -0.08
    share: Proportion = 0.4
    n: PositiveInt = 20
    first: PositiveInt = 10
    after: NonNegativeInt = 69
    reads_evaluations: ClassVar[bool] = False

    @property
    def required_fields(self) -> tuple[str, ...]:
        return ("headway",)

    def check_recipe(self, recipe: Recipe) -> str:
        if not recipe.average.measures_headway:
            return (
                'stop = "standstill" measures rounds against the averaged model; set average ='
                ' "ema"'
            )
        if self.first < 3:
            return (
                f"stop.first = {self.first}: the first two rounds have no headway to compare with;"
                " set at least 3"
            )
        return ""

    def compare_headway(self, history: Sequence[RoundRecord]) -> tuple[float, float] | None:
        """Mean headway of the last rounds and the least that goes on; None while there are too
        few.
        """
        headways = [h.diagnostics.headway for h in history if h.diagnostics.headway is not None]
        early = [
            h.diagnostics.headway
            for h in history
            if h.diagnostics.headway is not None and h.t <= self.first
        ]
        if not early or history[-1].diagnostics.headway is None or len(headways) < self.n:
            return None
        return sum(headways[-self.n :]) / self.n, self.level + self.share * sum(early) / len(early)

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        return max(self.after + 1, self.n + 2)  # headway is known from the third round on

    def trace(self, history: Sequence[RoundRecord]) -> StopCourse | None:
        looks = [
            (h.t, means)
            for i, h in enumerate(history)
            if (means := self.compare_headway(history[: i + 1])) is not None
        ]
        return StopCourse(
            "headway",
            "least",
            "mean headway of the last rounds",
            "",
            tuple(t for t, _ in looks),
            tuple(mean for _, (mean, _) in looks),
            tuple(least for _, (_, least) in looks),
        )

    def explain(self, history: Sequence[RoundRecord]) -> str:
        course = self.trace(history)
        if course is None or not course.rounds:
            return ""
        return (
            "Headway says how far a round goes on where those before it went: 1 straight on, 0"
            f" astray, below 0 back. A mean below {course.limits[-1]:.3f} is a standstill; over the"
            f" last rounds it was {course.values[-1]:.3f}."
        )

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        comparison = (
            self.compare_headway(history) if history and history[-1].t > self.after else None
        )
        if comparison is None or comparison[0] >= comparison[1]:
            return ""
        return f"headway {comparison[0]:.3f} < {comparison[1]:.3f} over {self.n} rounds"
