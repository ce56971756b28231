"""Every stop rule on every run: where it would have ended, what that would have saved, and what it
would have cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.roles import StopRule
from flrce_arena.records import CellRecord


@dataclass(frozen=True)
class StopRuleResult:
    """A rule over all runs of a task that had no stop of their own."""

    task: str
    rule: str
    stopped: int  # runs that it would have ended
    runs: int
    round: ConfidenceInterval  # where
    saved: ConfidenceInterval  # share of the joules, of the runs it ends
    given: ConfidenceInterval  # of the metric against the run's own end: below 0, worse


def evaluate_stop_rules(
    found: Sequence[CellRecord], rules: Mapping[str, StopRule]
) -> list[StopRuleResult]:
    """One line for each task and rule."""
    lines = []
    for task in dict.fromkeys(p.task for p in found):
        mine = [p for p in found if p.task == task and p.final_value is not None]
        whole = [p for p in mine if not p.rounds["stop"][-1]]
        for name, rule in rules.items():
            ends = [(p, end) for p in whole if (end := find_stop_round(p, rule)) is not None]
            joules = [(p.cumulative_cost("joules"), end) for p, end in ends]
            changes = [_compute_metric_change(p, end) for p, end in ends]
            measured = (
                [float(end) for _, end in ends],
                [1 - spent[end - 1] / spent[-1] for spent, end in joules],
                [change for change in changes if change is not None],
            )
            means = map(confidence_interval, measured)
            lines.append(StopRuleResult(task, name, len(ends), len(whole), *means))
    return lines


def find_stop_round(p: CellRecord, rule: StopRule) -> int | None:
    """The record after which the rule says stop, counted from 1; None: never."""
    history = p.history
    for i, h in enumerate(history, 1):
        if h.outcome == "committed" and rule(history[:i]):
            return i
    return None


def _compute_metric_change(p: CellRecord, end: int) -> float | None:
    values = [value for value in p.rounds["value"][:end] if value is not None]
    if not values or p.final_value is None or not np.isfinite(values[-1]):
        return None
    gain = float(values[-1]) - p.final_value
    return -gain if p.lower else gain
