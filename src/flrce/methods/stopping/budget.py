"""Budgets and patience: enough rounds, bytes, joules or seconds; no progress; or any of several
rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from flrce.core.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from flrce.core.cost_table import COSTS
from flrce.core.traits import CostAwareStop, RecipeChecker
from flrce.core.types import ClientCost, RoundRecord


@dataclass(frozen=True)
class CostLimit:
    """Stop when so much of one cost is spent; `cost` is a name in COSTS."""

    cost: str
    limit: PositiveFloat

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        used = COSTS[self.cost].of_run(history)
        return self._describe(used) if used >= self.limit else ""

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        """Why the next round, estimated so, is not affordable: it may use all that is left."""
        cost = COSTS[self.cost]
        used = cost.of_estimates(estimates) + cost.of_run(history)
        return f"next round would pass {self._describe(used)}" if used > self.limit else ""

    def _describe(self, used: float) -> str:
        return f"budget of {self.limit:g} {self.cost} ({used:.6g})"


@dataclass(frozen=True)
class CostBudget:
    """Stop when a budget is used up; a round that it cannot pay for is not even started."""

    rounds: PositiveInt | None = None
    bytes: PositiveFloat | None = None
    joules: PositiveFloat | None = None
    seconds: PositiveFloat | None = None
    grams: PositiveFloat | None = None  # of CO2

    @property
    def limits(self) -> dict[str, float]:
        """Cost -> the most that may be spent of it."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: limit for name, limit in found.items() if limit is not None}

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        limits = (CostLimit(*item) for item in self.limits.items() if item[0] != "rounds")
        return next((why for limit in limits if (why := limit(history))), "")

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        """Why the next round, estimated so, is not affordable; "" if it is."""
        if self.rounds is not None and COSTS["rounds"].of_run(history) >= self.rounds:
            return f"budget of {self.rounds} rounds"
        limits = (CostLimit(*item) for item in self.limits.items() if item[0] != "rounds")
        checks = (limit.check_next_round(history, estimates) for limit in limits)
        return next((why for why in checks if why), "")


@dataclass(frozen=True)
class Patience:
    """Stop when the headline metric has not improved by `least` on the best of before for `rounds`
    evaluations.
    """

    rounds: PositiveInt = 10
    least: NonNegativeFloat = 0.0

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        sign = -1.0 if history and history[-1].lower else 1.0
        values = [sign * h.final_model_metric for h in history if h.final_model_metric is not None]
        if len(values) <= self.rounds or history[-1].last_model_metric is None:
            return ""
        best = max(values[: -self.rounds])
        if max(values[-self.rounds :]) > best + self.least:
            return ""
        return f"no gain of {self.least:g} over {sign * best:.4f} in {self.rounds} evaluations"


@dataclass(frozen=True)
class AnyOf:
    """The first rule that says stop."""

    rules: tuple[Any, ...]

    def check_recipe(self, recipe: Any) -> str:
        checks = [rule.check_recipe for rule in self.rules if isinstance(rule, RecipeChecker)]
        return next((why for check in checks if (why := check(recipe))), "")

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return next((why for rule in self.rules if (why := rule(history))), "")

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        checks = [rule.check_next_round for rule in self.rules if isinstance(rule, CostAwareStop)]
        return next((why for check in checks if (why := check(history, estimates))), "")
