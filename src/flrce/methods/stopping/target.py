"""A stop at a goal: enough once the metric is where it should be, with a stated confidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from flrce.core.metric_format import format_metric_value
from flrce.core.roles import StopRule
from flrce.core.types import RoundRecord
from flrce.methods.stopping.marginal_gain import is_check_due
from flrce.methods.stopping.trend import (
    MIN_TREND_ROUNDS,
    collect_client_reports,
    collect_evaluations,
)


@dataclass(frozen=True)
class TargetEstimate:
    """The metric over the last rounds as its clients found it, and how sure that is."""

    value: float
    bound: float  # it is at least this good, or at most where less is better
    rounds: int


@dataclass(frozen=True)
class TargetMetric(StopRule):
    """Stop once the metric is at `value`, or below where less is better, with so much confidence.

    Counts what clients said in the last sweep (`holdouts`) of the models they were sent; where none
    says anything, the last evaluations. The bound is Student's, over rounds. Every look at which
    the mean is past the target is a test: the j-th spends 6 / (pi j)^2 of the error that is left to
    be made, so that all of them together keep to it.
    """

    value: Annotated[float, Ge(-1e18), Le(1e18)] = 0.9
    confidence: Annotated[float, Gt(0.5), Lt(1)] = 0.95

    def assess_history(self, history: Sequence[RoundRecord]) -> TargetEstimate | None:
        """What the record says after its last round; None while it says too little."""
        done = [h for h in history if h.outcome == "committed"]
        if not done:
            return None
        reports = collect_client_reports(done)
        if not len(reports.t):
            reports = collect_evaluations(done)
        sign = -1.0 if done[-1].evaluation.lower else 1.0
        tests, last = 0, None
        for t in [h.t for h in done if is_check_due(h.t) or h is done[-1]]:
            recent = (reports.t <= t) & (
                reports.t > t - max(math.ceil(reports.sweep), MIN_TREND_ROUNDS)
            )
            rounds, where = np.unique(reports.t[recent], return_inverse=True)
            if len(rounds) < MIN_TREND_ROUNDS:
                continue
            means = np.bincount(where, reports.value[recent]) / np.bincount(where)
            middle = float(means.mean())
            tests += middle >= sign * self.value
            width = student_t_quantile(
                (1 - self.confidence) * 6 / (math.pi * max(tests, 1)) ** 2, len(rounds) - 1
            )
            bound = middle - width * float(means.std(ddof=1)) / math.sqrt(len(rounds))
            last = TargetEstimate(sign * middle, sign * bound, len(rounds))
        return last

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        if not history or history[-1].outcome != "committed" or not is_check_due(history[-1].t):
            return ""
        seen = self.assess_history(history)
        sign = -1.0 if history[-1].evaluation.lower else 1.0
        if seen is None or sign * seen.bound < sign * self.value:
            return ""
        metric, least = (
            history[-1].evaluation.metric,
            "at most" if history[-1].evaluation.lower else "at least",
        )
        value, bound, target = (
            format_metric_value(metric, each) for each in (seen.value, seen.bound, self.value)
        )
        sure = f"{least} {bound} with {100 * self.confidence:g} % confidence"
        return (
            f"{metric} {value} over {seen.rounds} rounds ({sure}): the target of {target} is"
            " reached"
        )


def student_t_quantile(tail: float, freedom: int) -> float:
    """Student's t that is passed with this probability."""
    from scipy.stats import t as student

    return float(student.isf(tail, freedom))
