"""From numbers of each sample to an evaluation: every metric per client and over all samples."""

import math

import numpy as np
from numpy.typing import NDArray

from flrce.core.types import Evaluation, PrimaryMetric
from flrce.errors import BadInput, format_one_line
from flrce.simulation.workers import SampleScores
from flrce.training.metrics import BoundedMetric, MeanMetric, MetricLike
from flrce.training.objectives import Objective

Index = NDArray[np.int64]


def build_evaluation(
    objective: Objective, numbers: SampleScores, rows: Index, model: int
) -> Evaluation:
    """`rows` says whose sample each is, `model` what it costs to send the model to one client that
    judges it.
    """
    judges = objective.evaluation_metrics
    metrics = {
        judge.name: _mean_of_finite(compute_client_metrics(judge, numbers[judge.name], rows))
        for judge in judges
    }
    pooled = {judge.name: compute_metric(judge, numbers[judge.name]) for judge in judges}
    head = judges[0]
    return Evaluation(
        metrics[head.name],
        pooled[head.name],
        float(numbers["loss"].mean()),
        model * len(np.unique(rows)),
        head.name,
        head.better == "lower",
        metrics,
        pooled,
    )


def build_primary_metric(objective: Objective) -> PrimaryMetric:
    """The objective's primary metric."""
    head = objective.evaluation_metrics[0]
    low, high = (head.low, head.high) if isinstance(head, BoundedMetric) else (-math.inf, math.inf)
    return PrimaryMetric(head.name, head.better == "lower", float(low), float(high))


def compute_client_metrics(
    judge: MetricLike, numbers: NDArray[np.float64], rows: Index
) -> NDArray[np.float64]:
    """A figure for each client that has samples, in the order of their rows."""
    if isinstance(judge, MeanMetric) and judge.mean:
        count = np.bincount(rows)
        return (np.bincount(rows, numbers) / np.maximum(count, 1))[count > 0]
    edges = np.flatnonzero(np.diff(rows)) + 1  # rows are in order
    return np.array([compute_metric(judge, part) for part in np.split(numbers, edges)])


def compute_metric(judge: MetricLike, numbers: NDArray[np.float64]) -> float:
    """A metric of these samples' numbers; BadInput names one that fails."""
    try:
        return float(judge.value(numbers))
    except Exception as why:  # the user's own code
        raise BadInput(
            f"the metric {judge.name!r} fails on {len(numbers)} samples: {type(why).__name__}:"
            f" {format_one_line(why, 160)}; let its value give a number, NaN where there is none"
        ) from why


def compute_group_metrics(
    judge: MetricLike, numbers: NDArray[np.float64], groups: Index, count: int
) -> list[float | None]:
    """A metric for each of `count` groups of samples, by client or by class; None for a group
    without samples.
    """
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(1, count))
    parts = np.split(numbers[order], edges)
    values = [compute_metric(judge, part) if len(part) else math.nan for part in parts]
    return [value if math.isfinite(value) else None for value in values]


def _mean_of_finite(values: NDArray[np.float64]) -> float:
    """Over the clients that have a figure: an area under a curve needs both classes."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
