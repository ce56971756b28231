"""How a run's headline metric is named and shown: shares in percent, everything else as it is."""

from collections.abc import Iterable
from typing import Any

#: metrics between 0 and 1 that people read in percent
SHARES = frozenset({"accuracy", "top-5", "macro-f1", "auc", "label-f1", "subset-accuracy"})
NAMES = {"auc": "AUC", "mae": "MAE", "mse": "MSE", "r2": "R²", "macro-f1": "Macro F1", "label-f1": "Label F1"}


def name(metric: str) -> str:
    return NAMES.get(metric, metric[:1].upper() + metric[1:])


def heading(metric: str) -> str:
    """A column's or an axis' head."""
    return f"{name(metric)} %" if metric in SHARES else name(metric)


def unit(metric: str) -> float:
    """What one unit on paper stands for."""
    return 0.01 if metric in SHARES else 1.0


def digits(metric: str) -> int:
    return 1 if metric in SHARES else 4


def shown(metric: str, value: float | None) -> str:
    """A value in words: "93.1 %", "0.4127"; "--" where there is none."""
    if value is None:
        return "--"
    return f"{100 * value:.1f} %" if metric in SHARES else f"{value:.4g}"


def common(summaries: Iterable[dict[str, Any]]) -> str:
    """The metric of these runs; "headline" where they differ."""
    found = {str(summary.get("metric", "accuracy")) for summary in summaries}
    if not found:
        return "accuracy"
    return found.pop() if len(found) == 1 else "headline"
