"""Who leads, at equal budgets, and how sure that is.

A method's score on a task is the mean over seeds of the final model once a budget is
spent. Ranks are means over tasks; their intervals come from drawing seeds anew (bootstrap), and the
critical difference from Nemenyi's test over tasks (Demsar 2006): below it, a difference in rank is
what chance brings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, studentized_range

from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce_arena.records import CellRecord, list_cost_axes

BOOTSTRAP_DRAWS = 2_000
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class MethodStanding:
    """A method at one budget."""

    method: str
    rank: float  # mean over tasks; 1 is best
    # 95 % of the ranks under other draws of seeds, and the rank itself; None: nobody has a second
    # seed to draw
    low: float | None
    high: float | None
    first: float | None  # share of draws in which it leads; those that lead together share a draw
    scores: Mapping[str, ConfidenceInterval]  # task -> of the metric


@dataclass(frozen=True)
class Leaderboard:
    """A leaderboard."""

    axis: str
    share: float  # of what the reference spends
    budgets: Mapping[str, float]  # task -> of the axis
    standings: tuple[MethodStanding, ...]  # the best first
    # difference in rank that chance exceeds in 5 % of cases; None: one task or one method
    critical: float | None

    @property
    def is_tied(self) -> bool:
        """Whether the ranks tell no method from any other."""
        if self.critical is None or len(self.standings) < 2:
            return False
        return self.standings[-1].rank - self.standings[0].rank < self.critical


@dataclass(frozen=True)
class ParetoPoint:
    """Where a method ends on a task."""

    task: str
    method: str
    cost: ConfidenceInterval
    value: ConfidenceInterval
    front: float  # share of draws in which nobody is both better and cheaper


def compute_reference_budgets(
    cells: Sequence[CellRecord], axis: str, reference: str
) -> dict[str, float]:
    """What the reference spends on each task: the median over its seeds; tasks that spend none of
    it are left out.
    """
    spent: dict[str, list[float]] = {}
    for p in cells:
        if p.method == reference and len(p.rounds["t"]):
            spent.setdefault(p.task, []).append(float(p.cumulative_cost(axis)[-1]))
    medians = {task: float(np.median(values)) for task, values in spent.items()}
    return {task: median for task, median in medians.items() if median > 0}


def build_leaderboard(
    cells: Sequence[CellRecord],
    axis: str,
    share: float,
    reference: str,
    draws: int = BOOTSTRAP_DRAWS,
) -> Leaderboard:
    """The leaderboard at a share of the reference's budget; methods that miss a task are left
    out.
    """
    budgets = compute_reference_budgets(cells, axis, reference)
    limits = {task: share * spent for task, spent in budgets.items()}
    runs = group_runs(cells)
    methods = [
        method
        for method in dict.fromkeys(p.method for p in cells)
        if all((task, method) in runs for task in limits)
    ]
    merits = {
        task: [
            np.array([_to_merit(p, p.get_value_within(axis, limit)) for p in runs[task, method]])
            for method in methods
        ]
        for task, limit in limits.items()
    }
    means = [[_mean_merit(row) for row in rows] for rows in merits.values()]
    ranks = np.mean([rankdata([-mean for mean in row]) for row in means], axis=0)  # (methods,)
    # (draws, methods)
    drawn = _bootstrap_ranks(merits, draws) if has_repeated_seeds(cells) else None
    standings = []
    for i, method in enumerate(methods):
        scores = {t: _score_interval(runs[t, method], axis, limit) for t, limit in limits.items()}
        rank, sure = float(ranks[i]), (None, None, None)
        if drawn is not None:
            low, high = np.quantile(drawn[:, i], [0.025, 0.975])
            lead = float(_share_leads(drawn)[i])
            sure = (min(float(low), rank), max(float(high), rank), lead)  # type: ignore[assignment]
        standings.append(MethodStanding(method, rank, *sure, scores))
    standings.sort(key=lambda s: (s.rank, s.method))
    critical = critical_difference(len(methods), len(limits))
    return Leaderboard(axis, share, limits, tuple(standings), critical)


def group_runs(cells: Sequence[CellRecord]) -> dict[tuple[str, str], list[CellRecord]]:
    """(task, method) -> its runs."""
    runs: dict[tuple[str, str], list[CellRecord]] = {}
    for p in cells:
        runs.setdefault((p.task, p.method), []).append(p)
    return runs


def has_repeated_seeds(cells: Sequence[CellRecord]) -> bool:
    """Whether some method has a second seed on some task, without which draws of the seeds say
    nothing.
    """
    return len({(p.task, p.method) for p in cells}) < len(cells)


def critical_difference(methods: int, tasks: int) -> float | None:
    """Nemenyi's critical difference of mean ranks at 5 %.

    >>> round(critical_difference(5, 30), 3)  # Demsar 2006, table 5: q = 2.728
    1.114
    """
    if methods < 2 or tasks < 2:
        return None
    q = float(studentized_range.ppf(0.95, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * tasks))


def compute_pareto_points(
    cells: Sequence[CellRecord], axis: str, draws: int = BOOTSTRAP_DRAWS
) -> list[ParetoPoint]:
    """Every method's end on every task, and how often it is on the front of the best for their
    cost.
    """
    ended = [p for p in cells if p.final_value is not None]
    points = []
    for task in dict.fromkeys(p.task for p in cells):
        runs = group_runs([p for p in ended if p.task == task])
        costs = [np.array([p.cumulative_cost(axis)[-1] for p in group]) for group in runs.values()]
        merits = [np.array([_to_merit(p, p.final_value) for p in group]) for group in runs.values()]
        on_front = _bootstrap_front_shares(costs, merits, draws)
        for (key, group), cost, share in zip(runs.items(), costs, on_front, strict=True):
            ends = confidence_interval([p.final_value or 0.0 for p in group])
            spent = confidence_interval([float(c) for c in cost])
            points.append(ParetoPoint(*key, spent, ends, float(share)))
    return points


def rank_without_each_task(
    cells: Sequence[CellRecord], axis: str, share: float, reference: str
) -> dict[str, list[str]]:
    """What would change the order: the methods by rank when a task is left out."""
    tasks = list(dict.fromkeys(p.task for p in cells))
    if len(tasks) < 2:
        return {}
    rest = {task: [p for p in cells if p.task != task] for task in tasks}
    return {
        task: [s.method for s in build_leaderboard(rest[task], axis, share, reference, 1).standings]
        for task in tasks
    }


def _to_merit(p: CellRecord, value: float | None) -> float:
    """More is better."""
    if value is None or not np.isfinite(value):
        return -np.inf
    return -value if p.lower else value


def _score_interval(runs: Sequence[CellRecord], axis: str, limit: float) -> ConfidenceInterval:
    values = [p.get_value_within(axis, limit) for p in runs]
    return confidence_interval([value for value in values if value is not None])


def _mean_merit(values: FloatArray) -> float:
    """Below everything where one seed has no model yet."""
    return float(values.mean()) if np.isfinite(values).all() else -np.inf


def _bootstrap_ranks(merits: Mapping[str, list[FloatArray]], draws: int) -> FloatArray:
    """(draws, methods) mean ranks when the seeds are drawn anew, with replacement."""
    rng = np.random.default_rng(0)
    total = 0.0
    for rows in merits.values():
        means = np.stack(
            [row[rng.integers(len(row), size=(draws, len(row)))].mean(1) for row in rows], 1
        )
        total = total + rankdata(-means, axis=1)
    return np.asarray(total / len(merits))


def _share_leads(drawn: FloatArray) -> FloatArray:
    """(methods,) share of draws in which each has the best rank; they add up to 1."""
    leading = drawn == drawn.min(axis=1, keepdims=True)
    shares: FloatArray = (leading / leading.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares


def _bootstrap_front_shares(
    costs: Sequence[FloatArray], values: Sequence[FloatArray], draws: int
) -> FloatArray:
    """(methods,) share of draws in which no other method has a better mean at a lower one of
    cost.
    """
    rng = np.random.default_rng(0)
    cost, value = [], []
    for c, v in zip(costs, values, strict=True):
        picked = rng.integers(len(c), size=(draws, len(c)))
        cost.append(c[picked].mean(1))
        value.append(v[picked].mean(1))
    C, V = np.stack(cost, 1), np.stack(value, 1)  # (draws, methods)
    better = (C[:, :, None] >= C[:, None, :]) & (V[:, :, None] <= V[:, None, :])
    strictly = (C[:, :, None] > C[:, None, :]) | (V[:, :, None] < V[:, None, :])
    return np.asarray(1 - (better & strictly).any(2).mean(0))


def build_leaderboards(
    cells: Sequence[CellRecord], shares: Sequence[float], reference: str
) -> list[Leaderboard]:
    """One for every axis and share; the whole budget first."""
    return [
        build_leaderboard(cells, axis, share, reference)
        for axis in list_cost_axes(cells)
        for share in sorted(shares, reverse=True)
    ]
