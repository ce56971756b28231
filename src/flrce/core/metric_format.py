"""How metrics are named and shown: shares in percent, everything else as it is."""

from collections.abc import Iterable
from typing import Any

#: metrics between 0 and 1 that people read in percent
SHARES = frozenset({"accuracy", "top-5", "macro-f1", "auc", "label-f1", "subset-accuracy"})
NAMES = {
    "auc": "AUC",
    "mae": "MAE",
    "mse": "MSE",
    "r2": "R²",
    "macro-f1": "Macro F1",
    "label-f1": "Label F1",
}


def format_metric_name(metric: str) -> str:
    """A metric's name at the start of a sentence."""
    return NAMES.get(metric, metric[:1].upper() + metric[1:])


PLAIN_FROM, PLAIN_TO = 1e4, 1e9  # values shown without an exponent or decimals


def format_metric_value(metric: str, value: float | None) -> str:
    """A value in words: "93.1 %", "0.4127"; "--" where there is none."""
    if value is None:
        return "--"
    if metric in SHARES:
        return f"{100 * value:.1f} %"
    return f"{value:.0f}" if PLAIN_FROM <= abs(value) < PLAIN_TO else f"{value:.4g}"


def format_metric_noun(metric: str) -> str:
    """A metric's name within a sentence."""
    return metric if metric == "accuracy" else format_metric_name(metric)


def format_metric_heading(metric: str) -> str:
    """The heading of a column or an axis."""
    return f"{format_metric_name(metric)} %" if metric in SHARES else format_metric_name(metric)


def metric_unit(metric: str) -> float:
    """The value of one unit on paper."""
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
