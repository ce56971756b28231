"""What it takes each method to get where the reference ends: the arena's answer to "what was
saved?".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flrce_arena.leaderboard import BOOTSTRAP_DRAWS, group_runs, has_repeated_seeds
from flrce_arena.records import CellRecord

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class CostToReference:
    """A method on all tasks; its cost is a share of what the reference spends."""

    method: str
    reached: int  # runs that were as good as the reference's mean end
    runs: int
    # geometric mean over tasks of the mean over seeds; None: some task was never reached
    share: float | None
    low: float | None  # 95 % under other draws of the seeds; None: nobody has a second one
    high: float | None
    below: tuple[str, ...] = ()  # tasks on which it ends worse than the reference, in the mean


def compute_cost_to_reference(
    found: Sequence[CellRecord], axis: str, reference: str, draws: int = BOOTSTRAP_DRAWS
) -> list[CostToReference]:
    """Of methods that have all of the reference's tasks, the cheapest first. A run that never gets
    there counts with all that it spent, or with what the reference spends if that is more.
    """
    ends, whole = _compute_targets(found, axis, reference)
    runs = group_runs(found)
    lines = []
    for method in dict.fromkeys(p.method for p in found):
        if not all((task, method) in runs for task in ends):
            continue
        mine = {task: runs[task, method] for task in ends}
        costs = {t: [_find_cost_to_target(p, axis, ends[t]) for p in mine[t]] for t in ends}
        below = tuple(task for task in ends if not _ends_at_target(mine[task], ends[task]))
        reached = sum(cost is not None for each in costs.values() for cost in each)
        count = sum(map(len, costs.values()))
        line = CostToReference(method, reached, count, None, None, None, below)
        if all(any(cost is not None for cost in each) for each in costs.values()):
            shares = [_compute_cost_shares(mine[t], costs[t], axis, whole[t]) for t in ends]
            middle = _geometric_mean([each.mean(keepdims=True) for each in shares])[0]
            line = replace(line, share=float(middle))
            if has_repeated_seeds(found):
                low, high = np.quantile(_bootstrap_means(shares, draws), [0.025, 0.975])
                line = replace(line, low=float(low), high=float(high))
        lines.append(line)
    return sorted(lines, key=lambda r: (r.share is None, r.share or 0.0, r.method))


def _compute_targets(
    found: Sequence[CellRecord], axis: str, reference: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Per task: the mean of the reference's ends, and of what it spends; tasks that spend nothing
    are left out.
    """
    ends: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    for p in found:
        if p.method == reference and p.final_value is not None and p.cumulative_cost(axis)[-1] > 0:
            ends.setdefault(p.task, []).append(p.final_value)
            spent.setdefault(p.task, []).append(float(p.cumulative_cost(axis)[-1]))
    means = [{t: float(np.mean(v)) for t, v in values.items()} for values in (ends, spent)]
    return means[0], means[1]


def _ends_at_target(runs: Sequence[CellRecord], target: float) -> bool:
    ends = [p.final_value for p in runs if p.final_value is not None]
    mean = float(np.mean(ends)) if ends else float("nan")
    return mean <= target if runs[0].lower else mean >= target


def _find_cost_to_target(p: CellRecord, axis: str, target: float) -> float | None:
    """Spent by the first model that is as good; None: not one is."""
    for value, cost in zip(p.rounds["value"], p.cumulative_cost(axis), strict=True):
        if value is not None and (value <= target if p.lower else value >= target):
            return float(cost)
    return None


def _compute_cost_shares(
    runs: Sequence[CellRecord], costs: Sequence[float | None], axis: str, whole: float
) -> FloatArray:
    """(seeds,) of what the reference spends."""
    paid = [
        max(float(p.cumulative_cost(axis)[-1]), whole) if cost is None else cost
        for p, cost in zip(runs, costs, strict=True)
    ]
    return np.array(paid) / whole


def _geometric_mean(shares: Sequence[FloatArray]) -> FloatArray:
    found: FloatArray = np.exp(
        np.mean([np.log(np.maximum(each, 1e-12)) for each in shares], axis=0)
    )
    return found


def _bootstrap_means(shares: Sequence[FloatArray], draws: int) -> FloatArray:
    """(draws,) the same when seeds are drawn anew, with replacement."""
    rng = np.random.default_rng(0)
    return _geometric_mean(
        [each[rng.integers(len(each), size=(draws, len(each)))].mean(1) for each in shares]
    )
