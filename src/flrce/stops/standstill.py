"""A stop for skewed labels: enough once rounds undo one another, whatever their clients make of each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from flrce.pieces import Recipe
from flrce.types import Record


@dataclass(frozen=True)
class Standstill:
    """Stop once the mean headway of the last `n` rounds is below `level`, after `after` rounds.

    Headway is the cosine between a round's step and the way that the rounds before went (averages.py): above 0 while
    they follow one another, 0 where they wander, below 0 where each takes back what the last did. Conflict between
    rounds, where Algorithm 3 looks at conflict within one: clients with few labels each conflict in every round,
    whether training gets anywhere or not.
    """

    level: float = 0.0
    n: int = 10
    after: int = 20

    def __post_init__(self) -> None:
        if not (-1 <= self.level <= 1 and self.n >= 1 and self.after >= 0):
            raise ValueError(f"level must be from -1 to 1, n at least 1 and after at least 0, got {self}")

    def objection(self, recipe: Recipe) -> str:
        if hasattr(recipe.average, "headway"):
            return ""
        return 'stop = "standstill" measures rounds against the averaged model; set average = "ema"'

    def __call__(self, history: Sequence[Record]) -> str:
        known = [h.headway for h in history if h.headway is not None]
        if not history or history[-1].headway is None or history[-1].t <= self.after or len(known) < self.n:
            return ""
        mean = sum(known[-self.n :]) / self.n
        return f"headway {mean:.3f} < {self.level:g} over {self.n} rounds" if mean < self.level else ""
