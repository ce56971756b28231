"""From numbers of each sample to an evaluation: every metric per client and over all samples."""

import math

import numpy as np
from numpy.typing import NDArray

from flrce.engines.workers import Numbers
from flrce.errors import BadInput, brief
from flrce.local.metrics import Averages, Bounded, Judges
from flrce.local.objective import Objective
from flrce.types import Evaluation, Yardstick

Index = NDArray[np.int64]


def evaluation(objective: Objective, numbers: Numbers, rows: Index, model: int) -> Evaluation:
    """`rows` says whose sample each is, `model` what it costs to send the model to one client that judges it."""
    judges = objective.judges
    metrics = {judge.name: _mean(per_client(judge, numbers[judge.name], rows)) for judge in judges}
    pooled = {judge.name: figure(judge, numbers[judge.name]) for judge in judges}
    head = judges[0]
    return Evaluation(
        metrics[head.name], pooled[head.name], float(numbers["loss"].mean()), model * len(np.unique(rows)),
        head.name, head.better == "lower", metrics, pooled,
    )  # fmt: skip


def yardstick(objective: Objective) -> Yardstick:
    """The objective's headline metric."""
    head = objective.judges[0]
    low, high = (head.low, head.high) if isinstance(head, Bounded) else (-math.inf, math.inf)
    return Yardstick(head.name, head.better == "lower", float(low), float(high))


def per_client(judge: Judges, numbers: NDArray[np.float64], rows: Index) -> NDArray[np.float64]:
    """A figure for each client that has samples, in the order of their rows."""
    if isinstance(judge, Averages) and judge.mean:
        count = np.bincount(rows)
        return (np.bincount(rows, numbers) / np.maximum(count, 1))[count > 0]
    edges = np.flatnonzero(np.diff(rows)) + 1  # rows are in order
    return np.array([figure(judge, part) for part in np.split(numbers, edges)])


def figure(judge: Judges, numbers: NDArray[np.float64]) -> float:
    """A metric of these samples' numbers; BadInput names one that fails."""
    try:
        return float(judge.value(numbers))
    except Exception as why:  # the user's own code
        raise BadInput(
            f"the metric {judge.name!r} fails on {len(numbers)} samples: {type(why).__name__}: {brief(why, 160)}; let "
            "its value give a number, NaN where there is none"
        ) from why


def breakdown(judge: Judges, numbers: NDArray[np.float64], groups: Index, count: int) -> list[float | None]:
    """A metric for each of `count` groups of samples, by client or by class; None for a group without samples."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(1, count))
    parts = np.split(numbers[order], edges)
    values = [figure(judge, part) if len(part) else math.nan for part in parts]
    return [value if math.isfinite(value) else None for value in values]


def _mean(values: NDArray[np.float64]) -> float:
    """Over the clients that have a figure: an area under a curve needs both classes."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
