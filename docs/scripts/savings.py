"""Draw how many times fewer bytes and joules reach FedAvg's accuracy, from the committed runs.

python docs/scripts/savings.py [SVG]
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "research" / "studies"))

import savings_tables as study

ROOT = Path(__file__).resolve().parent.parent.parent
SVG = ROOT / "docs" / "img" / "savings.svg"
PLAN = json.loads((ROOT / "research" / "studies" / "plans" / "savings-fresh.json").read_text())
GREY, BLUE, INK = "#8b949e", "#1769aa", "#1f2328"
COSTS = {"bytes": "Traffic", "joules": "Modelled energy"}
#: row of the plan -> label
ROWS = {
    "frugal": "frugal (the default)",
    "STC, best share": "STC, its best share in each task",
    "EDEN 1 bit, 8-bit download, in turn": "EDEN, 1 bit up, 8 down",
}
CAPTION = (
    "times less than FedAvg with an averaged model\n"
    "until its accuracy after 100 rounds; dots: data sets; more is better"
)


def read_task_ratios(row: str, cost: str) -> list[float]:
    """One geometric mean for each task in which most seeds reach the target."""
    lines = study.read_lines(ROOT / "research" / "results" / "savings-fresh")
    means = study.compute_task_means(PLAN, lines)
    found = (means.get((task, row, cost, "averaged")) for task in PLAN["tasks"])
    return [float(np.exp(mean)) for mean in found if mean is not None]


def draw_rows(axes: Axes, cost: str) -> None:
    """A bar for the mean over tasks, a dot for each task."""
    for place, row in enumerate(ROWS):
        ratios = read_task_ratios(row, cost)
        mean = float(np.exp(np.mean(np.log(ratios))))
        axes.barh(place, mean, color=BLUE if place == 0 else GREY, height=0.55, alpha=0.85)
        axes.plot(ratios, [place] * len(ratios), "o", ms=4, mfc="white", mec=INK, mew=0.9)
        axes.annotate(
            f"{mean:.1f}x",
            (max(*ratios, mean), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontweight="bold" if place == 0 else "normal",
        )
    axes.set_title(COSTS[cost], loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_ylim(len(ROWS) - 0.5, -0.5)
    axes.margins(x=0.16)
    axes.axvline(1, color=INK, lw=0.8, ls=(0, (3, 3)))
    axes.tick_params(colors=INK, length=0)
    axes.spines[:].set_visible(False)


def main(path: Path = SVG) -> None:
    style = {
        "svg.hashsalt": "flrce",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",
        "font.size": 10.5,
    }
    with plt.rc_context(style):
        figure, panels = plt.subplots(2, 1, figsize=(6, 5), layout="constrained")
        for axes, cost in zip(panels, COSTS, strict=True):
            draw_rows(axes, cost)
            axes.set_yticks(range(len(ROWS)), ROWS.values(), color=INK)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        figure.supxlabel(CAPTION, fontsize=9.5, color=INK)
        figure.patch.set_facecolor("white")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
