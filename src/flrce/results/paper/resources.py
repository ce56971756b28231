"""The figures of energy, bandwidth, efficiency and of stopping or not, as tables beside what the paper says."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flrce.results.paper import paper
from flrce.results.paper.grid import Grid, difference, figures, ratios
from flrce.results.paper.plan import SHOWN
from flrce.results.paper.records import Run
from flrce.results.paper.results import stops, title
from flrce.results.paper.tables import ABSENT, Column, Interval, Table, paired

NO_NUMBER = "figure only"


def costs(grid: Grid, name: str, figure: str, unit: str, scale: float) -> Table:
    """Total joules or bytes of every method (the paper's figures of energy and bandwidth)."""
    computed = figure == "bytes"
    columns = (
        Column("data set"), Column("method"), Column(unit, 6 if computed else 3), Column("relative to FLrce", 2),
        Column("computed for the paper's rounds" if computed else "paper", 6), Column("difference", 6, True),
        Column("note"),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        flrce = grid.of(dataset, "flrce")
        for method in SHOWN:
            runs = grid.of(dataset, method)
            ours = Interval.of(figures(runs, figure, scale).values())
            expected = paper.PAYLOAD.get(dataset, {}).get(method) if computed else None
            relative = Interval.of(ratios(runs, flrce, lambda run: figures({0: run}, figure)[0]).values())
            gap = difference(ours, expected) if grid.whole else None
            said = expected if expected is not None else NO_NUMBER
            rows.append((paper.label(dataset), method, ours or ABSENT, relative, said, gap, grid.note(dataset, method)))
    what = "Bandwidth: payload up and down" if computed else "Energy of all clients"
    notes = (
        ("The paper's figure gives no numbers; those beside ours follow from its models and rounds.",)
        if computed
        else ("Joules are modelled for Jetson Nano boards, not measured; the paper's figure gives no numbers.",)
    )
    return Table(f"{name}-{grid.regime}", title(grid, f"{what}, {unit}"), columns, tuple(rows), notes)


def energy(grid: Grid) -> Table:
    return costs(grid, "fig-energy", "joules", "kJ", 1e-3)


def bandwidth(grid: Grid) -> Table:
    return costs(grid, "fig-bandwidth", "bytes", "GB", 1e-9)


def efficiency(grid: Grid) -> Table:
    """Accuracy per joule and per byte (eqs. 8 and 9), and how far FLrce is ahead of each method."""
    columns = (
        Column("data set"), Column("method"), Column("acc/kJ", 3), Column("acc/GB", 3),
        Column("FLrce's gain per joule, %", 1, True), Column("FLrce's gain per byte, %", 1, True),
        Column("accuracy per round, FLrce / this", 2), Column("paper's", 2), Column("note"),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        flrce = grid.of(dataset, "flrce")
        for method in SHOWN:
            runs = grid.of(dataset, method)
            each = [Interval.of(figures(runs, name).values()) for name in EFFICIENCIES]
            gains = [None if method == "flrce" else _gain([flrce], [runs], name) for name in EFFICIENCIES]
            per_round = None if method == "flrce" else Interval.of(ratios(flrce, runs, _per_round).values())
            row = (*(value or ABSENT for value in each), *gains, per_round, _paper_ratio(dataset, method))
            rows.append((paper.label(dataset), method, *row, grid.note(dataset, method)))
    rows += [_overall(grid, method) for method in SHOWN if method != "flrce"] if len(grid.request.datasets) > 1 else []
    notes = (
        f"The paper: FLrce gains at least {paper.COMPUTATION_GAIN:g} % per joule and {paper.COMMUNICATION_GAIN:g} % "
        "per byte on average; its figures are normalised and give no numbers. Joules are modelled.",
    )
    return Table(f"fig-efficiency-{grid.regime}", title(grid, "Efficiency"), columns, tuple(rows), notes)


EFFICIENCIES = ("computation_efficiency", "communication_efficiency")


def _overall(grid: Grid, method: str) -> tuple[Any, ...]:
    ours = [grid.of(dataset, "flrce") for dataset in grid.request.datasets]
    theirs = [grid.of(dataset, method) for dataset in grid.request.datasets]
    gains = [_gain(ours, theirs, name) or ABSENT for name in EFFICIENCIES]
    return ("Average", method, None, None, *gains, None, None, "over seeds present in all data sets")


def _gain(ours: Sequence[dict[int, Run]], theirs: Sequence[dict[int, Run]], name: str) -> Interval | None:
    """FLrce's relative gain in %, averaged over data sets for every seed that is in all of them."""
    each = [ratios(a, b, lambda run: run.summary[name] or 0.0) for a, b in zip(ours, theirs, strict=True)]
    seeds = sorted(set.intersection(*(set(found) for found in each)))
    return Interval.of(100 * (fmean(found[seed] for found in each) - 1) for seed in seeds)


def _per_round(run: Run) -> float:
    return float((run.summary["accuracy"] or 0.0) / max(run.summary["rounds"], 1))


def _paper_ratio(dataset: str, method: str) -> float | None:
    """FLrce's accuracy per round over the method's, from Table 3."""
    numbers = paper.TABLE3.get(dataset, {})
    if method not in numbers or method == "flrce":
        return None
    (ours, rounds), (theirs, others) = numbers["flrce"], numbers[method]
    return (ours / rounds) / (theirs / others)


def ablation(grid: Grid) -> Table:
    """FLrce with and without its early stop (section 4.4)."""
    columns = (
        Column("data set"), Column("seeds that stop"), Column("stops in round"), Column("accuracy %", 2),
        Column("without stop %", 2), Column("difference", 2, True), Column("worst seed", 2, True),
        Column("seeds that lose over 1 point"), Column("paper"),
        Column("acc/kJ without, % of with"), Column("acc/GB without, % of with"), Column("paper "), Column("note"),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        with_stop, without = grid.of(dataset, "flrce"), grid.of(dataset, "flrce-no-stop")
        ours, whole = figures(with_stop, "accuracy", 100), figures(without, "accuracy", 100)
        shares = [_share(without, with_stop, name) for name in EFFICIENCIES]
        said = paper.ABLATION.get(dataset, (None, None))
        gaps = [ours[seed] - whole[seed] for seed in sorted({*ours} & {*whole})]
        losers = f"{sum(gap < -1 for gap in gaps)} of {len(gaps)}" if gaps else None
        rows.append((
            paper.label(dataset), stops(with_stop), Interval.of(figures(with_stop, "rounds").values()) or ABSENT,
            Interval.of(ours.values()) or ABSENT, Interval.of(whole.values()) or ABSENT, paired(ours, whole),
            min(gaps, default=None), losers, said[0], *shares, said[1], grid.note(dataset, "flrce-no-stop"),
        ))  # fmt: skip
    return Table(f"fig-ablation-{grid.regime}", title(grid, "With and without early stopping"), columns, tuple(rows))


def _share(ours: dict[int, Run], theirs: dict[int, Run], name: str) -> Interval | None:
    """An efficiency as % of another, seed by seed."""
    return Interval.of(100 * value for value in ratios(ours, theirs, lambda run: run.summary[name] or 0.0).values())
