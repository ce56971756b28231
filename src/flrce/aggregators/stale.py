"""Replies that come late under an asynchronous pace, and how much less they count."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.aggregators.mean import step
from flrce.bounds import Amount, Part, Whole
from flrce.traits import Buffers
from flrce.types import Event, Updates


@dataclass(frozen=True)
class Discounted:
    """FedBuff (Nguyen et al. 2022): w + sum u_k / (1 + age_k)^exponent / P, over the P replies of a round.

    The sum is divided by the number of replies and not by their weights, so that a round of old ones goes less far.
    """

    exponent: Annotated[float, Ge(0), Le(100)] = 0.5

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor:
        each = (1 + ages(updates)) ** -self.exponent
        return step(w, updates, each, float(each.mean()))


@dataclass(frozen=True)
class Mixed:
    """How many rounds there were."""

    rounds: int = 0


@dataclass(frozen=True)
class Interpolated:
    """FedAsync (Xie et al. 2019): w + a_t (w_k - w), a_t = alpha s(age), one reply a round; w_k = its start + u_k.

    From round `after` on, alpha is `decay` times itself: the paper halves it after 800 rounds.
    s is 1 ("constant"), (1 + age)^-a ("polynomial"), or 1 up to an age of b and 1 / (a (age - b) + 1) beyond ("hinge").
    """

    alpha: Part = 0.6
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    a: Amount = 0.5
    b: Whole = 4
    decay: Part = 1.0
    after: Whole = 800

    def init(self, M: int, d: int, D: int) -> Mixed:
        return Mixed()

    def observe(self, memory: Mixed, event: Event) -> Mixed:
        return Mixed(event.t)

    def objection(self, recipe: Any) -> str:
        if recipe.partial:
            return f"FedAsync mixes whole models, but {recipe.partial} lets clients send parts; drop one"
        if not (isinstance(recipe.pace, Buffers) and recipe.pace.size == 1):
            return 'FedAsync mixes one reply at a time; set pace = {piece = "buffered", size = 1}'
        return ""

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor:
        found = w.double()
        alpha = self.alpha * (self.decay if memory is not None and memory.rounds + 1 >= self.after else 1.0)
        for row, age in enumerate(ages(updates).tolist()):
            start = w if updates.base is None else updates.base[row]
            found = torch.lerp(found, start.double() + updates.U[row].double(), alpha * self.weight(age))
        return found.to(w.dtype)

    def weight(self, age: float) -> float:
        """s(age)."""
        if self.staleness == "polynomial":
            return float((1 + age) ** -self.a)
        if self.staleness == "hinge" and age > self.b:
            return 1 / (self.a * (age - self.b) + 1)
        return 1.0


def ages(updates: Updates) -> Tensor:
    """(P,) float64 rounds since each client was sent its model."""
    if updates.age is None:
        return torch.zeros(len(updates), dtype=torch.float64)
    return updates.age.double()
