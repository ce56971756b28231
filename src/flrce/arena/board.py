"""Who leads, at equal budgets, and how sure that is.

A method's score on a task is the mean over seeds of the model it would hand back once a budget is spent. Ranks are
means over tasks; their intervals come from drawing seeds anew (bootstrap), and the critical difference from Nemenyi's
test over tasks (Demsar 2006): below it, a difference in rank is what chance brings.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, studentized_range

from flrce.arena.records import Played, axes
from flrce.intervals import Interval, interval

DRAWS = 2_000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Standing:
    """A method at one budget."""

    method: str
    rank: float  # mean over tasks; 1 is best
    low: float | None  # 95 % of the ranks under other draws of seeds; None: nobody has a second seed to draw
    high: float | None
    first: float | None  # share of draws in which it leads
    scores: Mapping[str, Interval]  # task -> of the metric


@dataclass(frozen=True)
class Board:
    """A leaderboard."""

    axis: str
    share: float  # of what the reference spends
    budgets: Mapping[str, float]  # task -> of the axis
    standings: tuple[Standing, ...]  # the best first
    critical: float | None  # difference in rank that chance exceeds in 5 % of cases; None: one task or one method


@dataclass(frozen=True)
class Point:
    """Where a method ends on a task."""

    task: str
    method: str
    cost: Interval
    value: Interval
    front: float  # share of draws in which nobody is both better and cheaper


def budgets(found: Sequence[Played], axis: str, reference: str) -> dict[str, float]:
    """What the reference spends on each task: the median over its seeds; tasks that spend none of it are left out."""
    spent: dict[str, list[float]] = {}
    for p in found:
        if p.method == reference and len(p.rounds["t"]):
            spent.setdefault(p.task, []).append(float(p.spent(axis)[-1]))
    medians = {task: float(np.median(values)) for task, values in spent.items()}
    return {task: median for task, median in medians.items() if median > 0}


def board(found: Sequence[Played], axis: str, share: float, reference: str, draws: int = DRAWS) -> Board:
    """The leaderboard at a share of the reference's budget; methods that miss a task are left out."""
    limits = {task: share * spent for task, spent in budgets(found, axis, reference).items()}
    methods = [m for m in dict.fromkeys(p.method for p in found) if _complete(found, m, limits)]
    merits = {task: _merits(found, task, methods, axis, limits[task]) for task in limits}
    ranks = np.mean([_ranks([_mean(row) for row in merits[task]]) for task in limits], axis=0)  # (methods,)
    drawn = _drawn(merits, draws) if several(found) else None  # (draws, methods)
    standings = []
    for i, method in enumerate(methods):
        scores = {task: _score(found, task, method, axis, limits[task]) for task in limits}
        standing = Standing(method, float(ranks[i]), None, None, None, scores)
        if drawn is not None:
            low, high = np.quantile(drawn[:, i], [0.025, 0.975])
            first = float(np.mean(drawn[:, i] == drawn.min(axis=1)))
            standing = replace(standing, low=float(low), high=float(high), first=first)
        standings.append(standing)
    standings.sort(key=lambda s: (s.rank, s.method))
    return Board(axis, share, limits, tuple(standings), critical(len(methods), len(limits)))


def several(found: Sequence[Played]) -> bool:
    """Whether some method has a second seed on some task, without which draws of the seeds say nothing."""
    return len({(p.task, p.method) for p in found}) < len(found)


def critical(methods: int, tasks: int) -> float | None:
    """Nemenyi's critical difference of mean ranks at 5 %.

    >>> round(critical(5, 30), 3)  # Demsar 2006, table 5: q = 2.728
    1.114
    """
    if methods < 2 or tasks < 2:
        return None
    q = float(studentized_range.ppf(0.95, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * tasks))


def fronts(found: Sequence[Played], axis: str, draws: int = DRAWS) -> list[Point]:
    """Every method's end on every task, and how often it is on the front of the best for their cost."""
    points = []
    for task in dict.fromkeys(p.task for p in found):
        mine = [p for p in found if p.task == task and p.final is not None]
        methods = list(dict.fromkeys(p.method for p in mine))
        runs = [[p for p in mine if p.method == method] for method in methods]
        costs = [np.array([p.spent(axis)[-1] for p in group]) for group in runs]
        values = [np.array([_signed(p, p.final) for p in group]) for group in runs]
        on = _on_front(costs, values, draws)
        for i, method in enumerate(methods):
            ends = interval([p.final for p in runs[i] if p.final is not None])
            points.append(Point(task, method, interval([float(c) for c in costs[i]]), ends, float(on[i])))
    return points


def without(found: Sequence[Played], axis: str, share: float, reference: str) -> dict[str, list[str]]:
    """What would change the order: the methods by rank when a task is left out."""
    tasks = list(dict.fromkeys(p.task for p in found))
    if len(tasks) < 2:
        return {}
    rest = {task: [p for p in found if p.task != task] for task in tasks}
    return {task: [s.method for s in board(rest[task], axis, share, reference, 1).standings] for task in tasks}


def _complete(found: Sequence[Played], method: str, tasks: Mapping[str, float]) -> bool:
    return all(any(p.task == task and p.method == method for p in found) for task in tasks)


def _signed(p: Played, value: float | None) -> float:
    """More is better."""
    if value is None or not np.isfinite(value):
        return -np.inf
    return -value if p.lower else value


def _merits(found: Sequence[Played], task: str, methods: Sequence[str], axis: str, limit: float) -> list[Array]:
    """Per method (seeds,), more is better."""
    mine = {method: [p for p in found if (p.task, p.method) == (task, method)] for method in methods}
    return [np.array([_signed(p, p.within(axis, limit)) for p in mine[method]]) for method in methods]


def _score(found: Sequence[Played], task: str, method: str, axis: str, limit: float) -> Interval:
    values = [p.within(axis, limit) for p in found if (p.task, p.method) == (task, method)]
    return interval([value for value in values if value is not None])


def _mean(values: Array) -> float:
    """Below everything where one seed has no model yet."""
    return float(values.mean()) if np.isfinite(values).all() else -np.inf


def _ranks(means: Sequence[float]) -> Array:
    """1 for the largest; equals share."""
    ranked: Array = rankdata([-mean for mean in means])
    return ranked


def _drawn(merits: Mapping[str, list[Array]], draws: int) -> Array:
    """(draws, methods) mean ranks when the seeds are drawn anew, with replacement."""
    rng = np.random.default_rng(0)
    total = 0.0
    for rows in merits.values():
        means = np.stack([row[rng.integers(len(row), size=(draws, len(row)))].mean(1) for row in rows], 1)
        total = total + rankdata(-means, axis=1)
    return np.asarray(total / len(merits))


def _on_front(costs: Sequence[Array], values: Sequence[Array], draws: int) -> Array:
    """(methods,) share of draws in which no other method has a better mean at a lower one of cost."""
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


def boards(found: Sequence[Played], shares: Sequence[float], reference: str) -> list[Board]:
    """One for every axis and share; the whole budget first."""
    return [board(found, axis, share, reference) for axis in axes(found) for share in sorted(shares, reverse=True)]
