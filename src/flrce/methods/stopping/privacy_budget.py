"""A budget of privacy: the run ends before a round would spend more epsilon than it may."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt, Lt

from flrce.core.bounds import PositiveFloat
from flrce.core.pieces import Recipe
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord
from flrce.methods.aggregation.private_mean import PrivateMean
from flrce.methods.privacy_accounting import account_rounds


@dataclass(frozen=True)
class PrivacyBudget(StopRule):
    """Stop when one more round would pass `epsilon` at `delta`, by what the aggregator
    `private-mean` reports.
    """

    piece: ClassVar[str] = "privacy-budget"
    reads_evaluations: ClassVar[bool] = False
    required_fields: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon: PositiveFloat = 8.0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5

    def check_recipe(self, recipe: Recipe) -> str:
        mean = recipe.aggregator
        if not isinstance(mean, PrivateMean) or not mean.noise:
            return (
                'privacy-budget needs aggregator = "private-mean" with noise above 0, which reports'
                " epsilon"
            )
        if mean.delta != self.delta:
            return (
                f"privacy-budget is for delta {self.delta:g}, and the aggregator accounts for delta"
                f" {mean.delta:g}; set both alike"
            )
        return ""

    def check_fleet(self, recipe: Recipe, M: int, d: int, D: int) -> str:
        """Why not even one round is affordable."""
        rate, noise = recipe.selector.sampling_rate(recipe.P, M), recipe.aggregator.noise  # type: ignore[attr-defined]
        first = account_rounds(1.0 if rate is None else rate, noise, 1, self.delta)
        if first <= self.epsilon:
            return ""
        return (
            f"privacy-budget of epsilon {self.epsilon:g}: one round spends {first:.4g} at noise"
            f" {noise:g}; raise the aggregator's noise or the budget"
        )

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        figures = history[-1].figures if history else {}
        after = figures.get("epsilon_next", 0.0)
        if after <= self.epsilon:
            return ""
        return (
            f"privacy budget of epsilon {self.epsilon:g} at delta {self.delta:g}"
            f" ({figures.get('epsilon', 0.0):.4g} spent, {after:.4g} after one more round)"
        )
