"""The figures of the concepts page, drawn with the library's own functions.

python docs/scripts/figures.py [FOLDER]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from flrce.core import linalg, relations
from flrce.core.types import RoundEvent, Updates
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.methods.server.averages import EMA

BLUE, ORANGE, GREEN, GREY = "#0066aa", "#d05a00", "#00805a", "#777777"
IMG = Path(__file__).resolve().parent.parent / "img"
Point = tuple[float, float]


def arrow(
    ax: Axes, start: Point, step: Point, colour: str, label: str, off: Point = (0.1, 0.1)
) -> None:
    """An update, from where it starts, with its name beside its tip."""
    end = (start[0] + step[0], start[1] + step[1])
    ax.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2, "shrinkA": 0, "shrinkB": 0},
    )
    ax.text(end[0] + off[0], end[1] + off[1], label, color=colour)


def relation(w: Point, u: Point, v: Point, age: int) -> float:
    """How client 0's update u relates to client 1's v, which is `age` rounds old (Algorithm 1)."""
    memory, at = relations.init_relationships(2, 2), torch.tensor(w)
    memory = relations.record_updates(
        memory, 9 - age, at, torch.tensor([1]), torch.tensor([v]), anchored=False
    )
    memory = relations.record_updates(
        memory, 9, at, torch.tensor([0]), torch.tensor([u]), anchored=False
    )
    return float(
        relations.compute_relationships(memory, 9, at, torch.tensor([0]), torch.tensor([u]))[0][
            0, 1
        ]
    )


def relationships(folder: Path) -> None:
    """Cosine of fresh updates; distance to the line of a stale one (eq. 5 and 6)."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    u, good, bad = (2.0, 0.6), (1.4, 1.5), (-1.2, 1.3)
    arrow(left, (0, 0), u, BLUE, "$u_k$")
    arrow(left, (0, 0), good, GREEN, f"$v_1$: {relation((1, 1), u, good, 1):+.2f}")
    arrow(left, (0, 0), bad, ORANGE, f"$v_2$: {relation((1, 1), u, bad, 1):+.2f}", (-0.3, 0.1))
    left.plot(0, 0, "o", color="black")
    left.text(0, -0.25, "w", ha="center")
    left.set(title="fresh: cosine", xlim=(-2, 3), ylim=(-0.6, 2.2))
    w, v, step = (3.0, 4.0), (1.0, 0.0), (0.0, -2.0)
    right.axhline(0, color=GREY, lw=1, ls="--")
    arrow(right, (0, 0), v, ORANGE, "$v_j$, stale", (-0.3, -0.7))
    arrow(right, w, step, BLUE, "$w + u_k$", (0.15, 0))
    right.plot(*w, "o", color="black")
    right.text(w[0] + 0.15, w[1], "w")
    for x, top, text in ((2.6, 4.0, "4"), (3.0, 2.0, "2")):
        right.plot((x, x), (0, top), color=GREY, lw=1, ls=":")
        right.text(x - 0.25, top / 2, text, color=GREY)
    value = relation(w, step, v, 8)
    right.set(
        title=f"stale: 1 - 2/4 = {value:+.2f} nearer to its line",
        xlim=(-0.6, 5.2),
        ylim=(-1.2, 4.8),
    )
    save(figure, (left, right), folder / "relationships.svg")


def exploration(folder: Path, T: int = 100) -> None:
    """phi(t) and the exploit rounds that may be expected by round t (Algorithm 2)."""
    phi = [RelationshipSelector().exploration_probability(t) for t in range(1, T + 1)]
    exploits = torch.tensor([1 - p for p in phi], dtype=torch.float64).cumsum(0).tolist()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    left.plot(range(1, T + 1), phi, color=BLUE, lw=2)
    left.set(title=r"$\varphi(t)$: probability to explore", xlabel="round", ylim=(0, 1.02))
    right.plot(range(1, T + 1), exploits, color=ORANGE, lw=2)
    right.set(title="expected exploit rounds so far", xlabel="round", ylim=(0, None))
    right.annotate(f"{exploits[-1]:.1f}", (T, exploits[-1]), (T - 12, exploits[-1] - 1), ha="right")
    save(figure, (), folder / "exploration.svg")


def stop(folder: Path) -> None:
    """Updates towards each client's own optimum: agreeing from afar, conflicting from amid them
    (Algorithm 3).
    """
    optima = [(3.4, 2.6), (4.6, 3.2), (4.4, 1.8), (3.2, 3.6), (5.0, 2.4)]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for ax, w, title in zip(axes, ((0.3, 0.4), (4.1, 2.7)), ("early", "late"), strict=True):
        steps = [((x - w[0]) * 0.8, (y - w[1]) * 0.8) for x, y in optima]
        for colour, (optimum, step) in zip(
            (BLUE, ORANGE, GREEN, "#aa4a88", "#96700a"),
            zip(optima, steps, strict=True),
            strict=True,
        ):
            ax.plot(*optimum, "x", color=colour)
            arrow(ax, w, step, colour, "")
        ax.plot(*w, "o", color="black")
        ax.text(w[0], w[1] - 0.35, "w", ha="center")
        count = linalg.mean_conflicts(linalg.gram_matrix(torch.tensor(steps)))
        ax.set(title=f"{title}: {count:g} of 4 peers conflict", xlim=(-0.2, 5.6), ylim=(-0.2, 4.2))
    save(figure, axes, folder / "stop.svg")


def course(models: Sequence[Point]) -> tuple[Point, float]:
    """The average before the last of these models, and the headway of the step to it
    (methods/server/averages.py).
    """
    w = [torch.tensor(model, dtype=torch.float64) for model in models]
    updates = Updates(torch.zeros(0), torch.zeros(0, 2), torch.zeros(0), trainable=2)
    events = [RoundEvent(t + 1, w[t], w[t + 1], updates, M=1) for t in range(len(w) - 1)]
    average = EMA()
    memory = average.initial_state(1, 2, 2)
    for event in events[:-1]:
        memory = average.observe(memory, event)
    x, y = average.model(memory, w[-2]).tolist()
    found = average.get_headway(average.observe(memory, events[-1]))
    return (x, y), 0.0 if found is None else found


def headway(folder: Path) -> None:
    """Rounds that follow one another, and rounds that undo one another."""
    ahead = [(0.8 * t, 0.25 * t + 0.25 * (-1) ** t) for t in range(7)]
    around = [(1.0, 0.9), (4.6, 2.6), (2.6, -0.3), (3.2, 2.9), (1.2, 1.0), (5.0, 0.6), (2.6, 2.7)]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for ax, models, title in zip(axes, (ahead, around), ("early", "late"), strict=True):
        average, found = course(models)
        ax.plot(*zip(*models[:-1], strict=True), "o-", color=GREY, ms=4, lw=1)
        (x, y), (a, b) = models[-2], models[-1]
        arrow(ax, average, (x - average[0], y - average[1]), GREEN, "")
        arrow(ax, (x, y), (a - x, b - y), BLUE, "")
        ax.text(a, b + 0.2, "this round's step", color=BLUE, ha="center")
        ax.plot(*average, "s", color=GREEN)
        ax.text(average[0], average[1] - 0.4, "average", color=GREEN, ha="center")
        ax.plot(x, y, "o", color="black")
        ax.set(title=f"{title}: headway {found:+.2f}", xlim=(-0.4, 6.4), ylim=(-0.8, 3.2))
    save(figure, axes, folder / "headway.svg")


def save(figure: plt.Figure, bare: Sequence[Axes], path: Path) -> None:
    """Write a figure whose bytes do not depend on the day; `bare` axes are drawings, not charts."""
    for ax in bare:
        ax.set_aspect("equal")
        ax.axis("off")
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def main(folder: Path = IMG) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(
        {"svg.hashsalt": "flrce", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        relationships(folder)
        exploration(folder)
        stop(folder)
        headway(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
