"""Budgets and patience: enough rounds, bytes, joules or seconds; no progress; or any of several
rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from flrce.core.bounds import NonNegativeFloat, PositiveFloat, PositiveInt
from flrce.core.cost_table import COSTS
from flrce.core.pieces import Recipe
from flrce.core.roles import StopRule, explain_wrong_role
from flrce.core.types import ClientCost, RoundEvent, RoundRecord
from flrce.errors import BadInput


@dataclass(frozen=True)
class CostLimit(StopRule):
    """Stop when so much of one cost is spent; `cost` is a name in COSTS."""

    cost: str
    limit: PositiveFloat
    reads_evaluations: ClassVar[bool] = False

    @property
    def required_fields(self) -> tuple[str, ...]:
        return (self.cost,)

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
class CostBudget(StopRule):
    """Stop when a budget is used up; a round that it cannot pay for is not even started."""

    rounds: PositiveInt | None = None
    bytes: PositiveFloat | None = None
    joules: PositiveFloat | None = None
    seconds: PositiveFloat | None = None
    grams: PositiveFloat | None = None  # of CO2
    reads_evaluations: ClassVar[bool] = False

    @property
    def limits(self) -> dict[str, float]:
        """Cost -> the most that may be spent of it."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: limit for name, limit in values.items() if limit is not None}

    @property
    def required_fields(self) -> tuple[str, ...]:
        return tuple(name for name in self.limits if name != "rounds")

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
class Patience(StopRule):
    """Stop when the primary metric has not improved by `least` on the best of before for `rounds`
    evaluations.
    """

    rounds: PositiveInt = 10
    least: NonNegativeFloat = 0.0

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        sign = -1.0 if history and history[-1].evaluation.lower else 1.0
        values = [sign * h.final_model_metric for h in history if h.final_model_metric is not None]
        if len(values) <= self.rounds or history[-1].last_model_metric is None:
            return ""
        best = max(values[: -self.rounds])
        if max(values[-self.rounds :]) > best + self.least:
            return ""
        return f"no gain of {self.least:g} over {sign * best:.4f} in {self.rounds} evaluations"

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        return (self.rounds + 1) * eval_every


@dataclass(frozen=True)
class AnyOf(StopRule):
    """The first rule that says stop."""

    rules: tuple[StopRule, ...]

    def __post_init__(self) -> None:
        for rule in self.rules:
            why = explain_wrong_role("stop", rule)
            if why:
                raise BadInput(f"recipe.stop: {why}")

    def list_rules(self) -> tuple[StopRule, ...]:
        return tuple(single for rule in self.rules for single in rule.list_rules())

    def check_recipe(self, recipe: Recipe) -> str:
        return next((why for rule in self.rules if (why := rule.check_recipe(recipe))), "")

    def check_fleet(self, recipe: Recipe, M: int, d: int, D: int) -> str:
        checks = (rule.check_fleet(recipe, M, d, D) for rule in self.rules)
        return next((why for why in checks if why), "")

    def explain(self, history: Sequence[RoundRecord]) -> str:
        return " ".join(text for rule in self.rules if (text := rule.explain(history)))

    def earliest_round(self, eval_every: int = 1, sweep: float | None = None) -> int:
        return min((rule.earliest_round(eval_every, sweep) for rule in self.rules), default=1)

    @property
    def has_state(self) -> bool:
        return any(rule.has_state for rule in self.rules)

    @property
    def observes_rounds(self) -> bool:
        return any(rule.observes_rounds for rule in self.rules if rule.has_state)

    @property
    def device_agnostic(self) -> bool:
        return all(rule.device_agnostic for rule in self.rules if rule.has_state)

    def initial_state(self, M: int, d: int, D: int) -> Any:
        rules = [rule for rule in self.rules if rule.has_state]
        return _join_states([rule.initial_state(M, d, D) for rule in rules])

    def observe(self, state: Any, event: RoundEvent) -> Any:
        pairs = [(rule, inner) for rule, inner in self._pair_states(state) if rule.has_state]
        return _join_states([rule.observe(inner, event) for rule, inner in pairs])

    def report_figures(self, state: Any, event: RoundEvent) -> Mapping[str, float]:
        figures: dict[str, float] = {}
        for rule, inner in self._pair_states(state):
            figures |= rule.report_figures(inner, event)
        return figures

    def report_client_figures(
        self, state: Any, event: RoundEvent
    ) -> Mapping[str, Mapping[int, float]]:
        figures: dict[str, Mapping[int, float]] = {}
        for rule, inner in self._pair_states(state):
            figures |= rule.report_client_figures(inner, event)
        return figures

    def _pair_states(self, state: Any) -> list[tuple[StopRule, Any]]:
        """Each rule with its state."""
        count = sum(rule.has_state for rule in self.rules)
        states = iter((state,) if count == 1 else state or ())
        return [(rule, next(states) if rule.has_state else None) for rule in self.rules]

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return next((why for rule in self.rules if (why := rule(history))), "")

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        return next(
            (why for rule in self.rules if (why := rule.check_next_round(history, estimates))), ""
        )

    @property
    def checks_costs(self) -> bool:
        return any(rule.checks_costs for rule in self.rules)


def _join_states(states: Sequence[Any]) -> Any:
    """The states of several rules; a single one stays as it is, as in earlier checkpoints."""
    return states[0] if len(states) == 1 else tuple(states) or None
