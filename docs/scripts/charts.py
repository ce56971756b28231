"""Draw the charts of the research pages from the tables on the same pages.

    python docs/scripts/charts.py [PAGE ...]

A chart shows numbers that its page states, so the two cannot differ.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PAGES = Path(__file__).resolve().parent.parent.parent / "research" / "docs"
COLORS, INK = ("#1769aa", "#8b949e"), "#1f2328"
NUMBER = r"[+-]?\d+(?:\.\d+)?"
RANGE = re.compile(
    rf"(?P<mean>{NUMBER}) ?(?:± ?(?P<half>{NUMBER})|[\[(](?P<low>{NUMBER})(?:, | to |-)(?P<high>{NUMBER})[\])])?"
)


@dataclass(frozen=True)
class Chart:
    """One chart: a table of a page, by the beginning of its header, and the columns to draw."""

    page: str
    header: str
    columns: tuple[str, ...]
    title: str
    labels: tuple[int, ...] = (0,)  # columns that name a row
    rows: str = ""  # a pattern that a row's label has
    reference: float | None = None
    log: bool = False


CHARTS = (
    Chart(
        "arena", "| method | mean rank", ("mean rank",), "Mean rank over five tasks; less is better"
    ),
    Chart(
        "average",
        "| cell | runs",
        ("ours - last",),
        "Points of the averaged model over the last one",
        reference=0.0,
    ),
    Chart(
        "baselines",
        "| method | setting | accuracy",
        ("minus FedAvg",),
        "CIFAR-10, Dirichlet(0.5): points over FedAvg",
        reference=0.0,
    ),
    Chart(
        "codes",
        "| code | share",
        ("share",),
        "Coding time, % of a client's training (paper's CNN, compiled kernels)",
    ),
    Chart(
        "fleets",
        "| | hours | time",
        ("time", "energy"),
        "Times synchronous FedAvg, to the same target",
        reference=1.0,
    ),
    Chart(
        "flower",
        "| MB | nodes | FedAvg | FLrce | FLrce with",
        ("ratio",),
        "Server's processor time, times FedAvg's (0.5 MB)",
        labels=(1,),
        reference=1.0,
    ),
    Chart(
        "gpu",
        "| network | floats | batch",
        ("times plain",),
        "Client steps, times a plain loop (H200)",
        labels=(0, 3, 4),
        log=True,
        reference=1.0,
    ),
    Chart(
        "kernels",
        "| network | training | evaluation",
        ("training", "evaluation"),
        "Times as fast as PyTorch (one thread)",
        reference=1.0,
    ),
    Chart(
        "robustness",
        "| digits, seeds 60",
        ("hardened, 40%", "fedavg, 40%"),
        "Accuracy with 40 % attackers, %",
    ),
    Chart(
        "selection",
        "| cell | candidate",
        ("minus chance, points",),
        "Points over turns by chance (labels skewed, 10 clients a round)",
        labels=(1,),
        rows=r"^labels, P=10",
        reference=0.0,
    ),
    Chart(
        "target-cost",
        "| task | target",
        ("FLrce's default, 4 bits", "+ turns by chance"),
        "Joules to the target, times FedAvg's with the same average and bits",
        reference=1.0,
    ),
)


def read_table(text: str, header: str) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of the first table whose header begins so."""
    lines = text[text.index(header) :].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return cells[0], cells[2:end]


def parse_interval(cell: str) -> tuple[float, float, float] | None:
    """(mean, low, high) of "1.2 ± 0.3", "1.2 [0.9, 1.5]", "1.2 (0.9 to 1.5)" or "1.2"."""
    plain = cell.replace("**", "").replace("\N{MINUS SIGN}", "-").replace(" %", "")
    found = RANGE.match(plain)
    if not found:
        return None
    mean = float(found["mean"])
    if found["half"]:
        return mean, mean - float(found["half"]), mean + float(found["half"])
    if found["low"]:
        return mean, float(found["low"]), float(found["high"])
    return mean, mean, mean


def select_rows(chart: Chart) -> list[tuple[str, list[tuple[float, float, float] | None]]]:
    """A label and one interval for each column, where a row has at least one number."""
    names, rows = read_table((PAGES / f"{chart.page}.md").read_text(), chart.header)
    columns = [names.index(column) for column in chart.columns]
    selected = []
    for row in rows:
        values = [parse_interval(row[i]) if i < len(row) else None for i in columns]
        if re.search(chart.rows, row[0]) and any(values):
            label = ", ".join(row[i] for i in chart.labels).replace("`", "")
            selected.append((label, values))
    return selected


def draw_chart(chart: Chart) -> Path:
    """A dot with its interval for each row and column."""
    rows = select_rows(chart)
    figure, axes = plt.subplots(figsize=(7.6, 0.9 + 0.3 * len(rows)), layout="constrained")
    for place, (_, values) in enumerate(rows):
        for number, value in enumerate(values):
            if value is None:
                continue
            mean, low, high = value
            y = place + 0.26 * (number - (len(values) - 1) / 2)
            axes.plot([low, high], [y, y], color=COLORS[number], lw=2.2, solid_capstyle="round")
            axes.plot(mean, y, "o", ms=5, color=COLORS[number], mec="white", mew=0.8)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=INK, lw=0.8, ls=(0, (3, 3)), zorder=0)
    if chart.log:
        axes.set_xscale("log")
    if len(chart.columns) > 1:
        handles = [plt.Line2D([], [], marker="o", color=color) for color in COLORS]
        axes.legend(handles, chart.columns, frameon=False, fontsize=8, loc="best")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="x", color="#d0d7de", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    path = PAGES / "img" / f"{chart.page}.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main(pages: list[str]) -> None:
    with plt.rc_context({"svg.hashsalt": "flrce", "svg.fonttype": "path", "font.size": 9}):
        for chart in CHARTS:
            if not pages or chart.page in pages:
                print(draw_chart(chart))


if __name__ == "__main__":
    main(sys.argv[1:])
