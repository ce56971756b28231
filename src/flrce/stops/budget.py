"""Budgets and patience: enough rounds, bytes, joules or seconds; no progress; or any of several rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flrce.bounds import Amount, Count, Positive
from flrce.round.living import elapsed
from flrce.traits import Objects, Refuses
from flrce.types import Record, Spent


@dataclass(frozen=True)
class Budget:
    """Stop when a budget is used up; a round that it cannot pay for is not even started."""

    rounds: Count | None = None
    bytes: Positive | None = None
    joules: Positive | None = None
    seconds: Positive | None = None
    grams: Positive | None = None  # of CO2

    def __call__(self, history: Sequence[Record]) -> str:
        return self._over(history, 0, 0.0, 0.0, 0.0)

    def before(self, history: Sequence[Record], estimates: Sequence[Spent]) -> str:
        """Why the next round, estimated so, is not affordable; "" if it is."""
        if self.rounds is not None and sum(h.outcome == "committed" for h in history) >= self.rounds:
            return f"budget of {self.rounds} rounds"
        slowest = max((s.seconds for s in estimates), default=0.0)
        joules = sum(s.joules + s.idle_watts * (slowest - s.seconds) for s in estimates)
        nbytes = sum(s.bytes_up + s.bytes_down for s in estimates)
        grams = sum(s.grams for s in estimates)
        return self._over(history, nbytes, joules, slowest, grams, "next round would pass ")

    def _over(
        self, history: Sequence[Record], nbytes: int, joules: float, seconds: float, grams: float, how: str = ""
    ) -> str:
        spent = {
            "bytes": nbytes + sum(h.bytes_up + h.bytes_down for h in history),
            "joules": joules + sum(h.joules for h in history),
            "seconds": seconds + elapsed(history),
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
    """Stop when the headline metric has not improved by `least` on the best of before for `rounds` evaluations."""

    rounds: Count = 10
    least: Amount = 0.0

    def __call__(self, history: Sequence[Record]) -> str:
        sign = -1.0 if history and history[-1].lower else 1.0
        values = [sign * h.handed for h in history if h.handed is not None]
        if len(values) <= self.rounds or history[-1].headline is None:
            return ""
        best = max(values[: -self.rounds])
        if max(values[-self.rounds :]) > best + self.least:
            return ""
        return f"no gain of {self.least:g} over {sign * best:.4f} in {self.rounds} evaluations"


@dataclass(frozen=True)
class AnyOf:
    """The first rule that says stop."""

    rules: tuple[Any, ...]

    def objection(self, recipe: Any) -> str:
        checks = [rule.objection for rule in self.rules if isinstance(rule, Objects)]
        return next((why for check in checks if (why := check(recipe))), "")

    def __call__(self, history: Sequence[Record]) -> str:
        return next((why for rule in self.rules if (why := rule(history))), "")

    def before(self, history: Sequence[Record], estimates: Sequence[Spent]) -> str:
        checks = [rule.before for rule in self.rules if isinstance(rule, Refuses)]
        return next((why for check in checks if (why := check(history, estimates))), "")
