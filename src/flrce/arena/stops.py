"""Every stop rule on every run: where it would have ended, what that would have saved, and what it would have cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flrce.arena.records import Played
from flrce.intervals import Interval, interval
from flrce.pieces import StopRule


@dataclass(frozen=True)
class Ending:
    """A rule over all runs of a task that had no stop of their own."""

    task: str
    rule: str
    stopped: int  # runs that it would have ended
    runs: int
    round: Interval  # where
    saved: Interval  # share of the joules, of the runs it ends
    given: Interval  # of the metric against the run's own end: below 0, worse


def endings(found: Sequence[Played], rules: Mapping[str, StopRule]) -> list[Ending]:
    """One line for each task and rule."""
    lines = []
    for task in dict.fromkeys(p.task for p in found):
        whole = [p for p in found if p.task == task and p.final is not None and not p.rounds["stop"][-1]]
        for name, rule in rules.items():
            ends = [(p, end) for p in whole if (end := ending(p, rule)) is not None]
            lines.append(
                Ending(
                    task,
                    name,
                    len(ends),
                    len(whole),
                    interval([float(end) for _, end in ends]),
                    interval([1 - p.spent("joules")[end - 1] / p.spent("joules")[-1] for p, end in ends]),
                    interval([given for p, end in ends if (given := _given(p, end)) is not None]),
                )
            )
    return lines


def ending(p: Played, rule: StopRule) -> int | None:
    """The record after which the rule says stop, counted from 1; None: never."""
    history = p.history()
    for i, h in enumerate(history, 1):
        if h.outcome == "committed" and rule(history[:i]):
            return i
    return None


def _given(p: Played, end: int) -> float | None:
    values = [value for value in p.rounds["value"][:end] if value is not None]
    if not values or p.final is None or not np.isfinite(values[-1]):
        return None
    gain = float(values[-1]) - p.final
    return -gain if p.lower else gain
