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
METHOD_COLOURS = dict(
    zip(
        SHOWN_METHODS,
        ("#0072B2", "#56B4E9", "#999999", "#009E73", "#E69F00", "#D55E00", "#000000", "#CC79A7"),
        strict=True,
    )
)
WIDTH, HEIGHT = 4.2, 3.2  # inches of one panel


def import_pyplot() -> Any:
    """matplotlib.pyplot without a display, or how to get it."""
    try:
        import matplotlib
    except ImportError as why:
        raise BadInput(f"figures need matplotlib; run: {format_install_command('report')}") from why
    matplotlib.use("agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "flrce",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.dpi": 100,
    }
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
    figure, axes = plt.subplots(
        height,
        width,
        figsize=(max(WIDTH * width, 6), HEIGHT * height + 0.7),
        squeeze=False,
        layout="constrained",
    )
    for spare in axes.flat[count:]:
        spare.axis("off")
    try:
        yield list(axes.flat[:count])
        figure.suptitle(title, fontsize=10)
        said = "\n".join(source.format_lines()).replace("`", "") if source else ""
        if said:
            figure.text(0.005, -0.01, said, fontsize=5, va="top", wrap=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"Title": title, "Description": said}
        figure.savefig(
            path.with_suffix(".svg"), metadata={**about, "Date": None}, bbox_inches="tight"
        )
        figure.savefig(
            path.with_suffix(".png"),
            metadata={**about, "Software": None},
            bbox_inches="tight",
            dpi=110,
        )
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
                points = (
                    mean_accuracy_curve(grid.get_runs(dataset, method), T)
                    if method != "flrce"
                    else {}
                )
                if points:
                    style = "--" if method == "fedavg" else "-"
                    _draw_line(
                        axis, points, color=METHOD_COLOURS[method], label=method, linestyle=style
                    )
            stops = [
                run for run in grid.get_runs(dataset, "flrce").values() if run.summary["stopped"]
            ]
            at = [run.summary["rounds"] for run in stops]
            axis.scatter(
                at,
                [100 * run.summary["accuracy"] for run in stops],
                marker="*",
                s=60,
                zorder=5,
                color=METHOD_COLOURS["flrce"],
                label="flrce stops",
            )
            axis.set(
                title=paper.get_dataset_label(dataset),
                xlabel="round",
                ylabel="mean validation accuracy, %",
            )
        axes[0].legend(fontsize=7, frameon=False)


def draw_method_bars(
    grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance, names: Sequence[str]
) -> None:
    """One panel per data set and figure, a bar per method."""
    datasets = [paper.get_dataset_label(dataset) for dataset in grid.request.datasets]
    with open_panels(path, len(names) * len(datasets), table.title, source, len(datasets)) as axes:
        for i, name in enumerate(names):
            for axis, dataset in zip(axes[i * len(datasets) :], datasets, strict=False):
                values = {
                    row[1]: row[table.get_column_index(name)]
                    for row in table.rows
                    if row[0] == dataset
                }
                _draw_bar_panel(axis, values, METHOD_COLOURS)
                axis.set(title=dataset, ylabel=name)


def _draw_bar_panel(axis: Any, values: Mapping[Any, Any], colours: Mapping[str, str]) -> None:
    for i, (name, value) in enumerate(values.items()):
        if isinstance(value, SeedInterval):
            axis.bar(
                i, value.mean, yerr=value.half or 0.0, color=colours.get(name, "#0072B2"), capsize=2
            )
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
    with open_panels(path, 2 * len(labels), table.title, source, len(labels)) as axes:
        for i, label in enumerate(labels):
            colours = {
                "with stop": METHOD_COLOURS["flrce"],
                "without": METHOD_COLOURS["flrce-no-stop"],
            }
            _draw_bar_panel(
                axes[i],
                {
                    name: rows[label][table.get_column_index(column)]
                    for name, column in both.items()
                },
                colours,
            )
            axes[i].set(title=label, ylabel="accuracy, %")
            parts = {"joule": "acc/kJ without, % of with", "byte": "acc/GB without, % of with"}
            lower = axes[len(labels) + i]
            _draw_bar_panel(
                lower,
                {
                    f"per {name}": rows[label][table.get_column_index(column)]
                    for name, column in parts.items()
                },
                {},
            )
            lower.axhline(100, color="#999999", linewidth=0.8, linestyle=":")
            lower.set(ylabel="efficiency without, % of with stop")


def draw_thresholds(grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance) -> None:
    """Efficiency, accuracy and round of the stop over psi."""
    labels = [paper.get_dataset_label(dataset) for dataset in grid.request.datasets]
    names = ("acc/kJ, best = 1", "acc/GB, best = 1", "accuracy %", "round")
    with open_panels(path, len(names) * len(labels), table.title, source, len(labels)) as axes:
        for i, name in enumerate(names):
            for axis, label in zip(axes[i * len(labels) :], labels, strict=False):
                found = [
                    (row[1], row[table.get_column_index(name)])
                    for row in table.rows
                    if row[0] == label
                ]
                found = [(psi, value) for psi, value in found if isinstance(value, SeedInterval)]
                x, y = [psi for psi, _ in found], [value.mean for _, value in found]
                axis.errorbar(
                    x,
                    y,
                    [v.half or 0.0 for _, v in found],
                    marker="o",
                    color=METHOD_COLOURS["flrce"],
                    capsize=2,
                )
                axis.set(title=label, xlabel="psi", ylabel=name)


def draw_motivation(grid: FinishedRuns, table: PaperTable, path: Path, source: Provenance) -> None:
    """Accuracy over the first rounds, IID and not, a panel per method."""
    dataset, T = grid.request.motivation_dataset, grid.request.scale.motivation
    with open_panels(path, len(paper.MOTIVATION_RATIOS), table.title, source) as axes:
        for axis, method in zip(axes, paper.MOTIVATION_RATIOS, strict=True):
            for regime, style in (("iid", "--"), (grid.regime, "-")):
                points = mean_accuracy_curve(grid.get_runs(dataset, method, regime, T), T)
                if points:
                    _draw_line(
                        axis, points, color=METHOD_COLOURS[method], label=regime, linestyle=style
                    )
                    axis.legend(fontsize=7, frameon=False)
            axis.set(title=method, xlabel="round", ylabel="mean validation accuracy, %")
