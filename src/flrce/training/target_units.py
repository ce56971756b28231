"""Metrics of standardised values in the unit of the raw ones: what trains are deviations from the
mean, what is reported are euros or years.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flrce.data.preprocessing import Preprocessing
from flrce.training.given_objectives import replace_metrics
from flrce.training.metrics import BoundedMetric, MeanMetric, Metric, MetricLike
from flrce.training.objectives import Objective

ANY_VALUE = (-float("inf"), float("inf"))


@dataclass(frozen=True)
class RestoredTargets:
    """The `of` of a metric, called on outputs and targets in their raw unit."""

    metric: MetricLike
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, out: Any, y: Tensor) -> Tensor:
        return self.metric.of(
            self._restore(out) if isinstance(out, Tensor) else out, self._restore(y)
        )

    def _restore(self, values: Tensor) -> Tensor:
        if len(self.mean) == 1:
            return values * self.deviation[0] + self.mean[0]
        mean, deviation = _make_constants(self.mean, self.deviation, values.device)
        return values * deviation + mean


@lru_cache(maxsize=16)
def _make_constants(
    mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Both on a device, put there once: a recorded evaluation may not copy from the host."""
    with torch.inference_mode(False):
        return torch.tensor(mean, device=device), torch.tensor(deviation, device=device)


def restore_target_units(objective: Objective, prepared: Preprocessing | None) -> Objective:
    """The objective with metrics in the unit of the raw targets, where these were standardised."""
    if prepared is None or not prepared.target_mean:
        return objective
    metrics = tuple(_restore_metric(metric, prepared) for metric in objective.evaluation_metrics)
    return replace_metrics(objective, metrics)


def _restore_metric(metric: MetricLike, prepared: Preprocessing) -> Metric:
    of = RestoredTargets(metric, prepared.target_mean, prepared.target_deviation)
    if isinstance(metric, Metric):
        return replace(metric, of=of)
    low, high = (metric.low, metric.high) if isinstance(metric, BoundedMetric) else ANY_VALUE
    mean = isinstance(metric, MeanMetric) and metric.mean
    return Metric(metric.name, of, metric.value, metric.better, low, high, mean)


def find_raw_metric(metric: MetricLike) -> MetricLike:
    """The metric without a change of unit."""
    of = getattr(metric, "of", None)
    return of.metric if isinstance(of, RestoredTargets) else metric
