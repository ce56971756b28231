"""Draw what reaching a target accuracy costs, from the committed runs.

python docs/scripts/target_cost.py [SVG]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "research" / "studies"))

import headline_tables as study

ROOT = Path(__file__).resolve().parent.parent.parent
SVG = ROOT / "docs" / "img" / "target-cost.svg"
Interval = tuple[float, float, float]
COSTS = {"joules": "Modelled energy until the target", "bytes": "Traffic until the target"}
CAPTION = (
    "relative to FedAvg + averaged model + 4-bit uploads; lines are 95 % intervals over data sets;"
    " less is better"
)
GREY, BLUE, INK = "#a9b1ba", "#1769aa", "#1f2328"
#: name in the study -> label in the picture
METHODS = {
    study.LAST["uniform"]: "FedAvg (4 of 6 data sets)",
    "uniform": "FedAvg + averaged model",
    study.PLAN["base"]: "... + 4-bit uploads",
    "chance, 4 bits": "... + clients in turn",
    "default": "FLrce default + 4-bit uploads",
}


def read_ratios(
    folder: Path = ROOT / "research" / "results" / "headline",
) -> dict[str, dict[str, Interval]]:
    """Method -> cost -> (geometric mean, lower, upper) over the data sets, relative to the study's
    base.
    """
    runs = study.even(study.read(folder))
    tasks = {task for task, _, _ in runs}
    comparisons = {
        task: study.compared(runs, task) for task in study.PLAN["tasks"] if task in tasks
    }
    return {
        method: {
            cost: tuple(map(float, study.bounds(study.over(comparisons, method, cost))))
            for cost in COSTS
        }
        for method in METHODS
    }


def draw_bars(axes: Axes, ratios: list[Interval], title: str) -> None:
    """One bar per method, the first on top, with its interval as a line and as text."""
    rows = range(len(ratios))
    means = [mean for mean, _, _ in ratios]
    colours = [BLUE if method == "default" else GREY for method in METHODS]
    axes.barh(rows, means, color=colours, height=0.62)
    for row, (mean, low, high) in enumerate(ratios):
        if high > low:
            axes.plot((low, high), (row, row), color=INK, lw=1.6, solid_capstyle="butt")
        text = f"{mean:.2f} [{low:.2f}, {high:.2f}]" if high > low else "1 (reference)"
        axes.text(2.5, row, text, va="center", color=INK, fontsize=10)
    axes.axvline(1, color=INK, lw=0.8, ls=(0, (3, 3)))
    axes.set(xlim=(0, 3.7), xticks=(0, 1, 2), ylim=(len(ratios) - 0.5, -0.5))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.spines[:].set_visible(False)


def main(path: Path = SVG) -> None:
    ratios = read_ratios()
    style = {
        "svg.hashsalt": "flrce",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
    }
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
        for axes, (cost, title) in zip(panels, COSTS.items(), strict=True):
            draw_bars(axes, [ratios[method][cost] for method in METHODS], title)
        panels[0].set_yticks(range(len(METHODS)), METHODS.values(), color=INK)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
        figure.supxlabel(CAPTION, fontsize=9.5, color=INK)
        figure.patch.set_facecolor("white")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
