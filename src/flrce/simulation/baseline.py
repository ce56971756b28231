"""What was dealt to whom, and the score of a constant prediction: what a model must beat to have
learnt anything.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flrce.data.federation import Federation
from flrce.simulation.simulator import build_evaluation
from flrce.training.metrics import METRICS
from flrce.training.objectives import Classification, Objective, Regression
from flrce.training.target_units import find_raw_metric

BATCH_SAMPLES = 8192  # samples whose constant outputs are made at a time
STORED_DIGITS = 6


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
