"""Runs grouped by experiment, with means and 95 % intervals over seeds, and curves."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.cost_table import COSTS, Cost, assumed_share, list_spent_costs
from flrce.core.intervals import ConfidenceInterval, confidence_interval, half_width
from flrce.core.metric_format import (
    find_common_metric,
    format_metric_heading,
    metric_digits,
    metric_unit,
)
from flrce.storage.read import RecordedRun
from flrce.storage.settings import NEUTRAL_SETTINGS, flatten_tables

FloatSeries = NDArray[np.float64]

SMOOTHING_WINDOW = 5  # evaluations in the running mean
CURVE_POINTS = 100  # of a curve that is a mean over seeds
#: figure -> heading, unit's name in `choose_units`, digits
EFFICIENCY_COLUMNS = {
    "computation_efficiency": ("Acc. per kJ", "", 2),
    "communication_efficiency": ("Acc. per GB", "", 2),
}
WASTED_COLUMN = ("Wasted %", "percent", 1)
ASSUMED_COLUMN = ("Assumed J %", "percent", 0)  # the share of the energy that rests on assumptions


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed only."""

    label: str
    runs: tuple[RecordedRun, ...]

    def get_values(self, figure: str) -> list[float]:
        figures = [get_summary_values(run)[figure] for run in self.runs]
        return [value for value in figures if value is not None]

    def compute_interval(self, figure: str) -> ConfidenceInterval:
        return confidence_interval(self.get_values(figure))


def get_summary_values(run: RecordedRun) -> dict[str, float | None]:
    """The headline figures of one run; None for energy that nobody knows."""
    s = run.summary
    unknown = ("joules", "joules_wasted") if s.get("energy") == "unknown" else ()
    values = {
        "accuracy": s.get("value", s["accuracy"]),
        **{name: s[name] for name in ("accuracy_last", *EFFICIENCY_COLUMNS)},
        **{name: cost.of_summary(s) for name, cost in COSTS.items()},
        **{name: s[name] for name in ("bytes_up", "bytes_down", "joules_wasted")},
        "wasted": s["joules_wasted"] / s["joules"] if s["joules"] else None,
        "assumed": assumed_share(s),
    }
    return values | dict.fromkeys(unknown)


def group_runs(runs: Sequence[RecordedRun]) -> list[RunGroup]:
    """Runs by experiment, seeds and what changes no result set aside; labels tell groups apart."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(list_result_settings(run).items())), []).append(run)
    parts = list(groups.values())
    labels = _label_groups([part[0] for part in parts])
    return [RunGroup(label, tuple(part)) for label, part in zip(labels, parts, strict=True)]


def _label_groups(runs: Sequence[RecordedRun]) -> list[str]:
    """Recipe names; where one repeats, with the settings in which its groups differ."""
    labels: list[str] = []
    for run in runs:
        same = [list_result_settings(other) for other in runs if other.name == run.name]
        mine = list_result_settings(run)
        keys = [key for key in mine if any(other.get(key) != mine[key] for other in same)]
        differences = ", ".join(f"{key.rpartition('.')[2]} {mine[key]}" for key in sorted(keys)[:3])
        label = f"{run.name} ({differences})" if differences else run.name
        again = sum(before == label or before.startswith(f"{label} #") for before in labels)
        labels.append(f"{label} #{again + 1}" if again else label)
    return labels


def list_result_settings(run: RecordedRun) -> dict[str, str]:
    """ "table.key" -> text of the settings that can change the result of a seed."""
    return {
        key: str(value)
        for key, value in flatten_tables(run.experiment).items()
        if key not in ("seed", *NEUTRAL_SETTINGS)
    }


def choose_units(parts: Sequence[RunGroup]) -> dict[str, tuple[float, str]]:
    """The unit in which each cost of these groups reads best."""
    chosen = {
        "percent": (0.01, "%"),
        "": (1.0, ""),
        "headline": (metric_unit(get_primary_metric(parts)), ""),
    }
    for name, cost in COSTS.items():
        largest = max((value for part in parts for value in part.get_values(name)), default=0.0)
        chosen[name] = cost.choose_unit(largest)
    return chosen


def list_shown_costs(parts: Sequence[RunGroup]) -> list[Cost]:
    """The costs of these groups that are worth a column."""

    def find_largest(cost: Cost) -> float:
        return max((value for part in parts for value in part.get_values(cost.name)), default=0)

    return list_spent_costs(find_largest)


def get_primary_metric(parts: Sequence[RunGroup]) -> str:
    """What these runs are judged by."""
    return find_common_metric(run.summary for part in parts for run in part.runs)


def get_summary_columns(parts: Sequence[RunGroup]) -> dict[str, tuple[str, str, int]]:
    """Figure -> heading, its unit in `choose_units`, digits, for the metric of these runs."""
    judged = get_primary_metric(parts)
    values = [abs(value) for part in parts for value in part.get_values("accuracy")]
    digits = metric_digits(judged, max(values, default=0.0))
    return {
        "accuracy": (format_metric_heading(judged), "headline", digits),
        **{cost.name: (cost.heading, cost.name, cost.digits) for cost in list_shown_costs(parts)},
        **(EFFICIENCY_COLUMNS if judged == "accuracy" else {}),
        "wasted": WASTED_COLUMN,
        **({"assumed": ASSUMED_COLUMN} if any(p.get_values("assumed") for p in parts) else {}),
    }


def build_summary_table(parts: Sequence[RunGroup]) -> tuple[list[str], list[list[Any]]]:
    """Headings, and per group its label, seeds and an interval per figure in its unit."""
    scales = choose_units(parts)
    heads = [
        f"{head} {scales[unit][1] if unit in COSTS else ''}".strip()
        for head, unit, _ in get_summary_columns(parts).values()
    ]
    rows = []
    for part in parts:
        row: list[Any] = [part.label, len(part.runs)]
        for name, (_, unit, _) in get_summary_columns(parts).items():
            row.append(part.compute_interval(name).divide_by(scales[unit][0]))
        rows.append(row)
    return ["Recipe", "Seeds", *heads], rows


def list_summary_figures() -> list[str]:
    """Every figure that a summary table may show."""
    return ["accuracy", *COSTS, *EFFICIENCY_COLUMNS, "wasted", "assumed"]


def to_plain_rows(parts: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """The headline for a program: figures in base units."""
    return [
        {"recipe": part.label, "seeds": [run.seed for run in part.runs]}
        | {"metric": get_primary_metric([part])}
        | {name: asdict(part.compute_interval(name)) for name in list_summary_figures()}
        for part in parts
    ]


def trace_metric(run: RecordedRun, axis: str, kind: str = "raw") -> tuple[FloatSeries, FloatSeries]:
    """The metric along an axis: rounds, or what had been spent, abandoned rounds included.

    `kind`: "raw", the model of the round; "averaged", the server average where one was kept;
    "smooth", a running mean.
    """
    x, y = [], []
    for h, total in zip(run.rounds, COSTS[axis].accumulate(run.rounds), strict=True):
        if h.last_model_metric is not None:
            x.append(float(total))
            averaged = kind == "averaged" and h.averaged is not None
            y.append(h.averaged if averaged else h.last_model_metric)
    values = np.array(y, dtype=np.float64)
    if kind == "smooth":
        sums = np.concatenate([[0.0], np.cumsum(values)])
        first = np.maximum(np.arange(len(values)) - SMOOTHING_WINDOW + 1, 0)
        values = (sums[1:] - sums[first]) / (np.arange(len(values)) - first + 1)
    return np.array(x), values


def compute_mean_band(
    part: RunGroup, axis: str, kind: str = "raw"
) -> tuple[FloatSeries, FloatSeries, FloatSeries | None]:
    """Mean metric of a group along an axis, and its interval; ended runs keep their last value."""
    courses = [c for c in (trace_metric(run, axis, kind) for run in part.runs) if len(c[0])]
    if not courses:
        return np.empty(0), np.empty(0), None
    if axis == "rounds" or len(courses) == 1:
        x = np.unique(np.concatenate([c[0] for c in courses]))
    else:
        x = np.linspace(min(c[0][0] for c in courses), max(c[0][-1] for c in courses), CURVE_POINTS)
    values = np.stack([np.interp(x, *c) for c in courses])  # (seeds, points)
    n = len(values)
    if n < 2:
        return x, values[0], None
    if n == 2:  # no interval worth drawing: from the one to the other
        return x, values.mean(0), np.abs(values[0] - values[1]) / 2
    return x, values.mean(0), half_width(values)
