"""From numbers of each sample to an evaluation: every metric per client and over all samples; and
the score of a constant prediction: what a model must beat to have learnt anything.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.types import Evaluation, PrimaryMetric
from flrce.data.federation import Federation
from flrce.errors import BadInput, format_one_line
from flrce.simulation.workers import SampleScores
from flrce.training.metrics import METRICS, BoundedMetric, MeanMetric, MetricLike
from flrce.training.objectives import Classification, Objective, Regression
from flrce.training.target_units import find_raw_metric

Index = NDArray[np.int64]
BATCH_SAMPLES = 8192  # samples whose constant outputs are made at a time
STORED_DIGITS = 6


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
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def describe_data(federation: Federation, objective: Objective) -> dict[str, Any]:
    """What was dealt to whom, and the score of a constant prediction where there is one."""
    baseline = constant_baseline(federation, objective)
    return {**federation.describe(), **({"baseline": baseline} if baseline else {})}


def constant_baseline(federation: Federation, objective: Objective) -> dict[str, Any]:
    """Every metric of the prediction of the most frequent class, or of the mean value, of the
    training samples.

    `metrics` are means over clients and `pooled` is over all hold-out samples; {} for other
    objectives.
    """
    if type(objective) not in (Classification, Regression):  # a subclass may want other outputs
        return {}
    assert isinstance(objective, Classification | Regression)
    known = tuple(
        judge
        for judge in objective.evaluation_metrics
        if METRICS.get(judge.name) is find_raw_metric(judge)
    )  # none of the user's
    return (
        _score_constant_prediction(federation, replace(objective, metrics=known)) if known else {}
    )


@lru_cache(maxsize=2)
def _score_constant_prediction(
    federation: Federation, objective: Classification | Regression
) -> dict[str, Any]:
    held, rows = federation.holdout_index
    train, y = np.concatenate([*federation.train, np.empty(0, np.int64)]), federation.source.y
    if not len(held) or not len(train):
        return {}
    if federation.source.kind == "classes" and isinstance(objective, Classification):
        counts = np.bincount(y[train], minlength=len(federation.source.classes))
        output, predicts = (
            _one_hot(counts),
            f"class {federation.source.classes[int(counts.argmax())]!r}",
        )
    elif federation.source.kind == "values" and isinstance(objective, Regression):
        mean = np.asarray(y[train], np.float64).mean(0)
        output, predicts = (
            torch.from_numpy(np.atleast_1d(mean).astype(np.float32)),
            "the mean of the training values",
        )
    else:
        return {}
    seen = build_evaluation(
        objective, _measure_constant_output(objective, output, y[held]), rows, 0
    )
    return {
        "predicts": predicts,
        "metrics": _round_metrics(seen.metrics),
        "pooled": _round_metrics(seen.pooled),
    }


def _one_hot(counts: NDArray[np.int64]) -> Tensor:
    output = torch.zeros(len(counts))
    output[int(counts.argmax())] = 1.0
    return output


def _measure_constant_output(
    objective: Objective, output: Tensor, y: NDArray[Any]
) -> dict[str, NDArray[np.float64]]:
    """What the objective's metrics keep of each sample, and its loss, for the same output
    everywhere.
    """
    found: dict[str, list[NDArray[np.float64]]] = {}
    for start in range(0, len(y), BATCH_SAMPLES):
        target = torch.from_numpy(np.array(y[start : start + BATCH_SAMPLES]))
        out = output.expand(len(target), -1)
        for judge in objective.evaluation_metrics:
            found.setdefault(judge.name, []).append(judge.of(out, target).double().numpy())
        found.setdefault("loss", []).append(np.zeros(len(target)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _round_metrics(metrics: Any) -> dict[str, float]:
    return {
        name: float(f"{value:.{STORED_DIGITS}g}")
        for name, value in metrics.items()
        if np.isfinite(value)
    }
