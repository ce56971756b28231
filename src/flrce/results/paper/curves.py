"""Accuracy round by round: the paper's figure of accuracy, its motivation, and the search for learning rates."""

from collections.abc import Mapping
from typing import Any

from flrce.results.paper import paper
from flrce.results.paper.grid import Grid, figures, ratios
from flrce.results.paper.plan import SHOWN, paper_rate
from flrce.results.paper.records import Run
from flrce.results.paper.results import title
from flrce.results.paper.tables import ABSENT, Column, Interval, Table, paired

EARLY, STILL_LEARNING = 0.1, 0.9  # a rate is too large if a tenth of T reaches nine tenths of the final accuracy


def curve(runs: Mapping[int, Run], T: int) -> list[Interval]:
    """Accuracy in % after each round; a run that stopped keeps the model it handed back."""
    held = [run.accuracies + run.accuracies[-1:] * (T - len(run.accuracies)) for run in runs.values()]
    points = [Interval.of(100 * accuracies[t] for accuracies in held) for t in range(T)]
    return [point for point in points if point]


def milestones(T: int) -> list[int]:
    return sorted({max(1, round(share * T)) for share in (0.1, 0.25, 0.5, 0.75, 1)})


def accuracy(grid: Grid) -> Table:
    """Mean validation accuracy per round; the csv has every round."""
    T = grid.request.scale.rounds
    columns = (Column("data set"), Column("method"), *(Column(f"round {t}") for t in milestones(T)), Column("note"))
    rows: list[tuple[Any, ...]] = []
    long: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        for method in SHOWN:
            points = curve(grid.of(dataset, method), T)
            shown = [points[t - 1] if points else ABSENT for t in milestones(T)]
            rows.append((paper.label(dataset), method, *shown, grid.note(dataset, method)))
            long += [(dataset, method, t, point) for t, point in enumerate(points, 1)]
    notes = ("Accuracy in %, mean over the clients' hold-outs. A stopped run keeps the accuracy it stopped with. "
             "The paper's figure gives no numbers.",)  # fmt: skip
    return Table(
        f"fig-accuracy-{grid.regime}", title(grid, "Accuracy per round"), columns, tuple(rows), notes,
        (Column("data set"), Column("method"), Column("round"), Column("accuracy %")), tuple(long),
    )  # fmt: skip


def motivation(grid: Grid) -> Table:
    """IID against non-IID (section 2): accuracy after a few rounds, and resources per accuracy."""
    dataset, T = grid.request.motivating, grid.request.scale.motivation
    columns = (
        Column("method"), Column(f"IID % at round {T}", 2), Column("non-IID %", 2), Column("difference", 2, True),
        Column("joules per accuracy, non-IID / IID", 2), Column("bytes per accuracy, non-IID / IID", 2),
        Column("paper", 2), Column("difference ", 2, True), Column("note"),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    long: list[tuple[Any, ...]] = []
    for method, said in paper.MOTIVATION.items():
        even, skewed = grid.of(dataset, method, "iid", T), grid.of(dataset, method, grid.regime, T)
        ours, theirs = figures(skewed, "accuracy", 100), figures(even, "accuracy", 100)
        joules = Interval.of(ratios(even, skewed, lambda run: run.summary["computation_efficiency"] or 0.0).values())
        traffic = Interval.of(ratios(even, skewed, lambda run: run.summary["communication_efficiency"] or 0.0).values())
        gap = traffic.mean - said if traffic and grid.whole else None
        seen = [Interval.of(values.values()) or ABSENT for values in (theirs, ours)]
        note = grid.note(dataset, method, min(len(ours), len(theirs)))
        rows.append((method, *seen, paired(ours, theirs), joules, traffic, said, gap, note))
        for name, runs in (("iid", even), (grid.regime, skewed)):
            long += [(method, name, t, point) for t, point in enumerate(curve(runs, T), 1)]
    notes = (f"Data set: {paper.label(dataset)}. IID: equal shares drawn at random from one pool.",)
    return Table(
        f"fig-motivation-{grid.regime}", title(grid, f"Motivation: {T} rounds, IID and not"), columns, tuple(rows),
        notes, (Column("method"), Column("data"), Column("round"), Column("accuracy %")), tuple(long),
    )  # fmt: skip


def rates(grid: Grid) -> Table:
    """The search for a learning rate by the paper's rule, with FedAvg."""
    T = grid.request.scale.rounds
    columns = (Column("data set"), Column("lr"), *(Column(f"round {t}") for t in milestones(T)), Column("note"))
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        points = {lr: curve(grid.rated(dataset, lr), T) for lr in grid.request.searched(dataset)}
        best = choose({lr: found for lr, found in points.items() if found})
        for lr, found in points.items():
            said = ["chosen"] if lr == best else []
            said += ["the paper's"] if dataset in paper.SETTINGS and lr == paper_rate(dataset) else []
            shown = [found[t - 1] if found else ABSENT for t in milestones(T)]
            rows.append((paper.label(dataset), f"{lr:g}", *shown, ", ".join(said) or None))
    notes = (
        "The paper's rule: too large a rate is one with which all methods are accurate within the very first few "
        "rounds, too small a one needs many more than T. Read here as: the most accurate after T rounds "
        f"among those that have not reached {STILL_LEARNING:.0%} of their final accuracy after {EARLY:.0%} of T; "
        "if all have, the most accurate.",
    )
    return Table(f"learning_rates-{grid.regime}", title(grid, "Search for learning rates"), columns, tuple(rows), notes)


def choose(points: Mapping[float, list[Interval]]) -> float | None:
    """The rate that the rule picks, from each one's accuracy after every round."""
    if not points:
        return None
    slow = {
        lr: found for lr, found in points.items()
        if found[max(round(EARLY * len(found)), 1) - 1].mean < STILL_LEARNING * found[-1].mean
    }  # fmt: skip
    return max(slow or points, key=lambda lr: (points[lr][-1].mean, -lr))
