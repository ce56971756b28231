"""Figures with matplotlib (extra `report`): svg and png, the same bytes for the same numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flrce.errors import BadInput, format_install_command
from flrce_reproduction import paper
from flrce_reproduction.curves import mean_accuracy_curve
from flrce_reproduction.grid import FinishedRuns
from flrce_reproduction.plan import SHOWN_METHODS
from flrce_reproduction.tables import PaperTable, Provenance, SeedInterval

#: Okabe and Ito's colours, which stay apart for colour-blind readers
COLOURS = ("#0072B2", "#56B4E9", "#999999", "#009E73", "#E69F00", "#D55E00", "#000000", "#CC79A7")
METHOD_COLOURS = dict(zip(SHOWN_METHODS, COLOURS, strict=True))
WIDTH, HEIGHT = 4.2, 3.2  # inches of one panel


def import_pyplot() -> Any:
    """matplotlib.pyplot without a display, or how to get it."""
    try:
        import matplotlib
    except ImportError as why:
        raise BadInput(f"figures need matplotlib; run: {format_install_command('report')}") from why
    matplotlib.use("agg")
    settings: Any = {"svg.hashsalt": "flrce", "svg.fonttype": "none", "font.size": 9}
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 100}
    matplotlib.rcParams |= settings
    import matplotlib.pyplot as plt

    return plt


@contextmanager
def open_panels(
    path: Path, count: int, title: str, source: Provenance | None, columns: int = 4
) -> Iterator[list[Any]]:
    """Axes to draw on; saved as path.svg and path.png with their source as metadata and in the
    margin.
    """
    plt = import_pyplot()
    width = min(count, columns)
    height = -(-count // width)
    size = (max(WIDTH * width, 6), HEIGHT * height + 0.7)
    how: Any = {"squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(height, width, figsize=size, **how)
    for spare in axes.flat[count:]:
        spare.axis("off")
    try:
        yield list(axes.flat[:count])
        figure.suptitle(title, fontsize=10)
        said = "\n".join(source.format_lines()).replace("`", "") if source else ""
        if said:
            figure.text(0.005, -0.01, said, fontsize=5, va="top", wrap=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        for suffix, absent in ((".svg", "Date"), (".png", "Software")):
            about = {"Title": title, "Description": said, absent: None}
            how = {"dpi": 110} if suffix == ".png" else {}
            figure.savefig(path.with_suffix(suffix), metadata=about, bbox_inches="tight", **how)
    finally:
        plt.close(figure)


def _draw_line(axis: Any, points: Mapping[int, SeedInterval], **style: Any) -> None:
    """A mean accuracy over rounds with its band, which ends at 0 and 100 %."""
    t = list(points)
    axis.plot(t, [p.mean for p in points.values()], linewidth=1.3, **style)
    low, high = (
        [min(max(p.mean + side * (p.half or 0.0), 0), 100) for p in points.values()]
        for side in (-1, 1)
    )
    axis.fill_between(t, low, high, alpha=0.13, linewidth=0, color=style["color"])


def draw_accuracy(grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance) -> None:
    """Accuracy per round; a star where a seed of FLrce stops."""
    T = grid.request.scale.rounds
    with open_panels(path, len(grid.request.datasets), table.title, source) as axes:
        for axis, dataset in zip(axes, grid.request.datasets, strict=True):
            for method in SHOWN_METHODS:
                if method == "flrce":
                    continue
                if points := mean_accuracy_curve(grid.get_runs(dataset, method), T):
                    style = {"linestyle": "--" if method == "fedavg" else "-", "label": method}
                    _draw_line(axis, points, color=METHOD_COLOURS[method], **style)
            runs = grid.get_runs(dataset, "flrce").values()
            ends = [run.summary for run in runs if run.summary["stopped"]]
            at, accuracy = [s["rounds"] for s in ends], [100 * s["accuracy"] for s in ends]
            star: Any = {"marker": "*", "s": 60, "zorder": 5, "label": "flrce stops"}
            axis.scatter(at, accuracy, color=METHOD_COLOURS["flrce"], **star)
            axis.set(title=paper.get_dataset_label(dataset), xlabel="round")
            axis.set(ylabel="mean validation accuracy, %")
        axes[0].legend(fontsize=7, frameon=False)


def draw_method_bars(
    grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance, names: Sequence[str]
) -> None:
    """One panel per data set and figure, a bar per method."""
    datasets = [paper.get_dataset_label(dataset) for dataset in grid.request.datasets]
    with open_panels(path, len(names) * len(datasets), table.title, source, len(datasets)) as axes:
        for i, name in enumerate(names):
            for axis, dataset in zip(axes[i * len(datasets) :], datasets, strict=False):
                column = table.get_column_index(name)
                values = {row[1]: row[column] for row in table.rows if row[0] == dataset}
                _draw_bar_panel(axis, values, METHOD_COLOURS)
                axis.set(title=dataset, ylabel=name)


def _draw_bar_panel(axis: Any, values: Mapping[Any, Any], colours: Mapping[str, str]) -> None:
    for i, (name, value) in enumerate(values.items()):
        if isinstance(value, SeedInterval):
            colour = colours.get(name, "#0072B2")
            axis.bar(i, value.mean, yerr=value.half or 0.0, color=colour, capsize=2)
        else:
            axis.text(i, 0, " not yet run", rotation=90, fontsize=7, ha="center", va="bottom")
    axis.set_xticks(range(len(values)), [str(name) for name in values], rotation=40, ha="right")
    axis.set_ylim(bottom=0)


def draw_ablation(grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance) -> None:
    """Accuracy with and without the stop, and the efficiency that is left without it."""
    labels = [paper.get_dataset_label(dataset) for dataset in grid.request.datasets]
    chosen = {
        paper.get_dataset_label(dataset): grid.request.scale.scale_psi(grid.get_psi(dataset))
        for dataset in grid.request.datasets
    }
    rows = {row[0]: row for row in table.rows if row[1] == chosen[row[0]]}
    both = {"with stop": "accuracy %", "without": "without stop %"}
    parts = {"per joule": "acc/kJ without, % of with", "per byte": "acc/GB without, % of with"}
    names = {"with stop": "flrce", "without": "flrce-no-stop"}
    colours = {name: METHOD_COLOURS[method] for name, method in names.items()}

    def select(label: str, columns: Mapping[str, str]) -> dict[str, Any]:
        row = rows[label]
        return {name: row[table.get_column_index(column)] for name, column in columns.items()}

    with open_panels(path, 2 * len(labels), table.title, source, len(labels)) as axes:
        for upper, lower, label in zip(axes, axes[len(labels) :], labels, strict=False):
            _draw_bar_panel(upper, select(label, both), colours)
            upper.set(title=label, ylabel="accuracy, %")
            _draw_bar_panel(lower, select(label, parts), {})
            lower.axhline(100, color="#999999", linewidth=0.8, linestyle=":")
            lower.set(ylabel="efficiency without, % of with stop")


def draw_thresholds(grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance) -> None:
    """Efficiency, accuracy and round of the stop over psi."""
    labels = [paper.get_dataset_label(dataset) for dataset in grid.request.datasets]
    names = ("acc/kJ, best = 1", "acc/GB, best = 1", "accuracy %", "round")
    with open_panels(path, len(names) * len(labels), table.title, source, len(labels)) as axes:
        for i, name in enumerate(names):
            for axis, label in zip(axes[i * len(labels) :], labels, strict=False):
                column = table.get_column_index(name)
                cells = [(row[1], row[column]) for row in table.rows if row[0] == label]
                means = {psi: x for psi, x in cells if isinstance(x, SeedInterval)}
                y, half = [v.mean for v in means.values()], [v.half or 0.0 for v in means.values()]
                style: Any = {"marker": "o", "color": METHOD_COLOURS["flrce"], "capsize": 2}
                axis.errorbar(list(means), y, half, **style)
                axis.set(title=label, xlabel="psi", ylabel=name)


def draw_motivation(grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance) -> None:
    """Accuracy over the first rounds, IID and not, a panel per method."""
    dataset, T = grid.request.motivation_dataset, grid.request.scale.motivation
    with open_panels(path, len(paper.MOTIVATION_RATIOS), table.title, source) as axes:
        for axis, method in zip(axes, paper.MOTIVATION_RATIOS, strict=True):
            for regime, style in (("iid", "--"), (grid.regime, "-")):
                points = mean_accuracy_curve(grid.get_runs(dataset, method, regime, T), T)
                if points:
                    colour = METHOD_COLOURS[method]
                    _draw_line(axis, points, color=colour, label=regime, linestyle=style)
                    axis.legend(fontsize=7, frameon=False)
            axis.set(title=method, xlabel="round", ylabel="mean validation accuracy, %")
