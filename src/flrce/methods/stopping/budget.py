"""Budgets and patience: enough rounds, bytes, joules or seconds; no progress; or any of several
rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flrce.core.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from flrce.core.fleet_state import replay_clock
from flrce.core.traits import CostAwareStop, RecipeChecker
from flrce.core.types import ClientCost, RoundRecord


@dataclass(frozen=True)
class CostBudget:
    """Stop when a budget is used up; a round that it cannot pay for is not even started."""

    rounds: PositiveInt | None = None
    bytes: PositiveFloat | None = None
    joules: PositiveFloat | None = None
    seconds: PositiveFloat | None = None
    grams: PositiveFloat | None = None  # of CO2

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return self._explain_overrun(history, 0, 0.0, 0.0, 0.0)

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        """Why the next round, estimated so, is not affordable; "" if it is."""
        if (
            self.rounds is not None
            and sum(h.outcome == "committed" for h in history) >= self.rounds
        ):
            return f"budget of {self.rounds} rounds"
        slowest = max((s.seconds for s in estimates), default=0.0)
        joules = sum(s.joules + s.idle_watts * (slowest - s.seconds) for s in estimates)
        nbytes = sum(s.bytes_up + s.bytes_down for s in estimates)
        grams = sum(s.grams for s in estimates)
        return self._explain_overrun(
            history, nbytes, joules, slowest, grams, "next round would pass "
        )

    def _explain_overrun(
        self,
        history: Sequence[RoundRecord],
        nbytes: int,
        joules: float,
        seconds: float,
        grams: float,
        how: str = "",
    ) -> str:
        spent = {
            "bytes": nbytes + sum(h.bytes_up + h.bytes_down for h in history),
            "joules": joules + sum(h.joules for h in history),
            "seconds": seconds + replay_clock(history),
            "grams": grams + sum(h.grams for h in history),
        }
        for name, used in spent.items():
            limit = getattr(self, name)
            if limit is None:
                continue
            over = used > limit if how else used >= limit  # the next round may use all that is left
            if over:
                return f"{how}budget of {limit:g} {name} ({used:.6g})"
        return ""


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
