"""Saved runs for a paper: tables as pandas, csv and LaTeX, curves as figures."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.intervals import ConfidenceInterval
from flrce.core.metric_format import format_metric_heading, metric_unit
from flrce.errors import BadInput, format_install_command, suggest_name
from flrce.report.tables import (
    RunGroup,
    build_summary_table,
    compute_mean_band,
    get_primary_metric,
    get_summary_columns,
    group_runs,
)
from flrce.report.tasks import require_one_task
from flrce.storage import read
from flrce.storage.disk import BY_UMASK, write_atomically

LATEX_ESCAPES = {char: f"\\{char}" for char in "&%$#_{}"}
PLOT_AXES = ("rounds", "bytes", "joules")  # what the figures of `save` are drawn along
PNG_DPI = 200


@dataclass(frozen=True, eq=False, repr=False)
class RunResults:
    """The runs of some folders; seeds of one experiment are one group."""

    groups: tuple[RunGroup, ...]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{group.label}: {len(group.runs)}" for group in self.groups)
        return f"RunResults({sizes})"

    def summarize(self) -> tuple[list[str], list[list[Any]]]:
        """Headings and a row per group: label, seeds, and an interval per figure in its unit."""
        return build_summary_table(self.groups)

    def list_rounds(self) -> list[dict[str, Any]]:
        """One row per run and round: label, seed, round, metric, loss and costs so far."""
        rows = []
        for group in self.groups:
            for run in group.runs:
                spent = {name: cost.accumulate(run.rounds) for name, cost in COSTS.items()}
                for i, record in enumerate(run.rounds):
                    row = {"recipe": group.label, "seed": run.seed, "round": record.t}
                    row |= {record.metric: record.last_model_metric, "loss": record.loss}
                    row |= {n: float(v[i]) for n, v in spent.items() if n != "rounds"}
                    rows.append(row)
        return rows

    def to_pandas(self, table: str = "summary") -> Any:
        """A DataFrame: "summary" (means, half-widths of 95 % intervals) or "rounds"."""
        try:
            import pandas
        except ImportError as why:
            raise BadInput("RunResults.to_pandas() needs pandas; pip install pandas") from why
        return pandas.DataFrame(self._list_plain_rows(table))

    def to_csv(self, path: Path | str, table: str = "summary") -> None:
        """Write a table as csv."""
        rows, text = self._list_plain_rows(table), StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(Path(path), text.getvalue().encode(), BY_UMASK)

    def to_latex(self) -> str:
        """The summary as a tabular, for booktabs; intervals as mean and half-width."""
        heads, rows = self.summarize()
        digits = [0, 0, *(d for _, _, d in get_summary_columns(self.groups).values())]
        lines = [" & ".join(escape_latex(head) for head in heads) + r" \\", r"\midrule"]
        for row in rows:
            cells = [format_latex_cell(v, d) for v, d in zip(row, digits, strict=True)]
            lines.append(" & ".join(cells) + r" \\")
        columns = "l" + "r" * (len(heads) - 1)
        body = ["\\begin{tabular}{" + columns + "}", r"\toprule", *lines, r"\bottomrule"]
        return "\n".join([*body, r"\end{tabular}", ""])

    def plot(self, axis: str = "rounds", axes: Any = None) -> Any:
        """The metric along rounds or a cost, with 95 % intervals; the axes of matplotlib."""
        if axis not in COSTS:
            raise BadInput(f"axis = {axis!r} is unknown; {suggest_name(axis, COSTS)}")
        try:
            from matplotlib import pyplot
        except ImportError as why:
            raise BadInput(
                f"RunResults.plot() needs matplotlib; {format_install_command('report')}"
            ) from why
        axes = axes or pyplot.subplots(figsize=(6, 3.5), layout="constrained")[1]
        metric = get_primary_metric(self.groups)
        unit = metric_unit(metric)
        bands = [(group, *compute_mean_band(group, axis)) for group in self.groups]
        per, name = COSTS[axis].choose_unit(max((b[1].max(initial=0) for b in bands), default=0))
        for group, x, mean, half in bands:
            (line,) = axes.plot(x / per, mean / unit, label=group.label, linewidth=1.5)
            if half is not None:
                low, high = (mean - half) / unit, (mean + half) / unit
                axes.fill_between(x / per, low, high, color=line.get_color(), alpha=0.15)
        label = f"{COSTS[axis].heading} {name}".strip()
        axes.set(xlabel=label, ylabel=format_metric_heading(metric))
        axes.legend()
        return axes

    def save(self, folder: Path | str) -> list[Path]:
        """Write every table as csv, the summary as LaTeX, and figures as PNG."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for table in ("summary", "rounds"):
            self.to_csv(place / f"{table}.csv", table)
        write_atomically(place / "summary.tex", self.to_latex().encode(), BY_UMASK)
        for axis in PLOT_AXES:
            figure = self.plot(axis).figure
            figure.savefig(place / f"{axis}.png", dpi=PNG_DPI)
            figure.clear()
        return sorted(place.iterdir())

    def _list_plain_rows(self, table: str) -> list[dict[str, Any]]:
        if table == "rounds":
            return self.list_rounds()
        if table != "summary":
            raise BadInput(f"table = {table!r} is unknown; use summary or rounds")
        heads, rows = self.summarize()
        return [_flatten_row(heads, row) for row in rows]


def _flatten_row(heads: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for head, value in zip(heads, row, strict=True):
        if isinstance(value, ConfidenceInterval):
            flat |= {head: value.mean, f"{head} +-": value.half}
        else:
            flat[head] = value
    return flat


def format_latex_cell(value: Any, digits: int) -> str:
    """A number with its interval, or text."""
    if not isinstance(value, ConfidenceInterval):
        return escape_latex(str(value))
    if value.mean is None:
        return "--"
    if not value.half:
        return f"{value.mean:.{digits}f}"
    return f"${value.mean:.{digits}f} \\pm {value.half:.{digits}f}$"


def escape_latex(text: str) -> str:
    return "".join(LATEX_ESCAPES.get(char, char) for char in text)


def read_results(*folders: Path | str) -> RunResults:
    """The saved runs below the folders; BadInput where they are of different data."""
    runs = read.read_runs([Path(folder) for folder in folders])
    require_one_task(runs, "read those of each apart")
    return RunResults(tuple(group_runs(runs)))
