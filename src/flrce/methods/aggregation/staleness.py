"""Replies that come late under an asynchronous pace, and how much less they count."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from flrce.core.bounds import NonNegativeFloat, NonNegativeInt, PositiveProportion
from flrce.core.pieces import Recipe
from flrce.core.roles import Aggregator
from flrce.core.types import RoundEvent, Updates
from flrce.methods.aggregation.mean import add_weighted_mean


@dataclass(frozen=True)
class StalenessDiscountedMean(Aggregator):
    """FedBuff (Nguyen et al. 2022): w + sum u_k / (1 + age_k)^exponent / P, over the P replies of a
    round.

    The sum is divided by the number of replies and not by their weights, so that a round of old
    ones goes less far.
    """

    exponent: Annotated[float, Ge(0), Le(100)] = 0.5

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        weights = (1 + get_update_ages(updates)) ** -self.exponent
        return add_weighted_mean(w, updates, weights, float(weights.mean()))


@dataclass(frozen=True)
class FedAsyncState:
    """How many rounds there were."""

    rounds: int = 0


@dataclass(frozen=True)
class FedAsyncMixing(Aggregator):
    """FedAsync (Xie et al. 2019): w + a_t (w_k - w), a_t = alpha s(age), one reply a round; w_k =
    its start + u_k.

    From round `after` on, alpha is `decay` times itself: the paper halves it after 800 rounds. s is
    1 ("constant"), (1 + age)^-a ("polynomial"), or 1 up to an age of b and 1 / (a (age - b) + 1)
    beyond ("hinge").
    """

    alpha: PositiveProportion = 0.6
    staleness: Literal["constant", "hinge", "polynomial"] = "polynomial"
    a: NonNegativeFloat = 0.5
    b: NonNegativeInt = 4
    decay: PositiveProportion = 1.0
    after: NonNegativeInt = 800

    def initial_state(self, M: int, d: int, D: int) -> FedAsyncState:
        return FedAsyncState()

    def observe(self, state: FedAsyncState, event: RoundEvent) -> FedAsyncState:
        return FedAsyncState(event.t)

    def check_recipe(self, recipe: Recipe) -> str:
        if why := recipe.explain_parts("FedAsync mixes whole models"):
            return why
        if recipe.pace.buffer_size != 1:
            return 'FedAsync mixes one reply at a time; set pace = {piece = "buffered", size = 1}'
        return ""

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        mixed = w.double()
        alpha = self.alpha * (
            self.decay if state is not None and state.rounds + 1 >= self.after else 1.0
        )
        for row, age in enumerate(get_update_ages(updates).tolist()):
            start = w if updates.base is None else updates.base[row]
            mixed = torch.lerp(
                mixed, start.double() + updates.U[row].double(), alpha * self.staleness_weight(age)
            )
        return mixed.to(w.dtype)

    def staleness_weight(self, age: float) -> float:
        """s(age)."""
        if self.staleness == "polynomial":
            return float((1 + age) ** -self.a)
        if self.staleness == "hinge" and age > self.b:
            return 1 / (self.a * (age - self.b) + 1)
        return 1.0


def get_update_ages(updates: Updates) -> Tensor:
    """(P,) float64 rounds since each client was sent its model."""
    if updates.age is None:
        return torch.zeros(len(updates), dtype=torch.float64)
    return updates.age.double()
