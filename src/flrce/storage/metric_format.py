"""How a run's headline metric is named and shown: shares in percent, everything else as it is."""

from collections.abc import Iterable
from typing import Any

from flrce.core.record import SHARES as SHARES
from flrce.core.record import format_metric, metric_name

format_metric_name, format_metric_value = metric_name, format_metric


def format_metric_noun(metric: str) -> str:
    """A metric's name within a sentence."""
    return metric if metric == "accuracy" else format_metric_name(metric)


def format_metric_heading(metric: str) -> str:
    """A column's or an axis' head."""
    return f"{format_metric_name(metric)} %" if metric in SHARES else format_metric_name(metric)


def metric_unit(metric: str) -> float:
    """What one unit on paper stands for."""
    return 0.01 if metric in SHARES else 1.0


def metric_digits(metric: str, largest: float = 0.0) -> int:
    """Decimals of a metric; large values, such as errors of prices, have fewer."""
    if metric in SHARES:
        return 1
    return 4 if largest < 1e3 else 1 if largest < 1e4 else 0


def find_common_metric(summaries: Iterable[dict[str, Any]]) -> str:
    """The metric of these runs; "headline" where they differ."""
    metrics = {str(summary.get("metric", "accuracy")) for summary in summaries}
    if not metrics:
        return "accuracy"
    return metrics.pop() if len(metrics) == 1 else "headline"
