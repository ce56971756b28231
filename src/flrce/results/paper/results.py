"""Tables 3 and 4 beside the paper's numbers."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from flrce.results.paper import paper
from flrce.results.paper.grid import Grid, difference, figures
from flrce.results.paper.plan import SHOWN
from flrce.results.paper.records import Run
from flrce.results.paper.tables import ABSENT, Column, Interval, Table, paired


def title(grid: Grid, what: str) -> str:
    scale = grid.request.scale
    size = f"M={scale.clients}, P={scale.per_round}, T={scale.rounds}, E={scale.epochs}"
    seeds = len(grid.request.seeds)
    return f"{what}, regime {grid.regime} ({size}, {seeds} seed{'s' if seeds > 1 else ''})"


def table3(grid: Grid) -> Table:
    """Final accuracy and rounds of every method (Table 3)."""
    columns = (
        Column("data set"), Column("method"), Column("accuracy %", 2), Column("paper %", 2),
        Column("difference", 2, True), Column("rounds"), Column("paper rounds", 0),
        Column("difference in rounds", 1, True), Column("FLrce minus this, points", 2, True),
        Column("FLrce without stop minus this", 2, True), Column("note"),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        reference, whole = (figures(grid.of(dataset, name), "accuracy", 100) for name in ("flrce", "flrce-no-stop"))
        for method in SHOWN:
            ours = figures(grid.of(dataset, method), "accuracy", 100)
            rounds = Interval.of(figures(grid.of(dataset, method), "rounds").values())
            numbers = paper.TABLE3.get(dataset, {}).get(method)
            gaps = _gaps(method, ours, reference, whole)
            row = _beside(Interval.of(ours.values()), rounds, numbers, grid.whole)
            rows.append((paper.label(dataset), method, *row, *gaps, grid.note(dataset, method)))
    rows += _average(grid)
    notes = ("`flrce` is `flrce-no-stop` cut in the round in which its rule fires; until then the two are one run.",)
    return Table(f"table3-{grid.regime}", title(grid, "Table 3: accuracy and rounds"), columns, tuple(rows), notes)


def _gaps(
    method: str, ours: Mapping[int, float], stopped: Mapping[int, float], whole: Mapping[int, float]
) -> tuple[Interval | None, Interval | None]:
    """FLrce minus a method, with its stop and without, seed by seed; the second is what selection alone does."""
    if method == "flrce":
        return None, None
    return paired(stopped, ours), None if method == "flrce-no-stop" else paired(whole, ours)


def _beside(
    accuracy: Interval | None, rounds: Interval | None, numbers: tuple[float, int] | None, whole: bool
) -> tuple[Any, ...]:
    """Ours, the paper's and the difference, of accuracy and of rounds."""
    theirs = numbers if numbers else (None, None)
    near = theirs if whole else (None, None)
    return (
        accuracy or ABSENT, theirs[0], difference(accuracy, near[0]),
        rounds or ABSENT, theirs[1], difference(rounds, near[1]),
    )  # fmt: skip


def _average(grid: Grid) -> list[tuple[Any, ...]]:
    """The paper's last row: means over its four data sets, here seed by seed."""
    if set(grid.request.datasets) != set(paper.SETTINGS):
        return []
    rows: list[tuple[Any, ...]] = []
    reference, whole = (_mean(grid, name, "accuracy", 100) for name in ("flrce", "flrce-no-stop"))
    for method in SHOWN:
        ours, rounds = _mean(grid, method, "accuracy", 100), _mean(grid, method, "rounds")
        row = _beside(Interval.of(ours.values()), Interval.of(rounds.values()), paper.AVERAGE.get(method), grid.whole)
        gaps = _gaps(method, ours, reference, whole)
        rows.append(("Average", method, *row, *gaps, "over seeds present in all four" if ours else ABSENT))
    return rows


def _mean(grid: Grid, method: str, name: str, scale: float = 1.0) -> dict[int, float]:
    each = [figures(grid.of(dataset, method), name, scale) for dataset in grid.request.datasets]
    seeds = set.intersection(*(set(found) for found in each))
    return {seed: fmean(found[seed] for found in each) for seed in sorted(seeds)}


def table4(grid: Grid) -> Table:
    """The threshold sweep (Table 4 and its figures), replayed from the runs without a stop."""
    columns = (
        Column("data set"), Column("psi"), Column("stopped"), Column("accuracy %", 2), Column("paper %", 2),
        Column("difference", 2, True), Column("round"), Column("paper round", 0),
        Column("difference in rounds", 1, True), Column("acc/kJ, best = 1", 3), Column("note"),
    )  # fmt: skip
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        sweep = {psi: grid.stopped(dataset, psi) for psi in paper.PSI}
        gains = {psi: Interval.of(figures(runs, "computation_efficiency").values()) for psi, runs in sweep.items()}
        best = max((gain.mean for gain in gains.values() if gain), default=1.0)
        for psi, runs in sweep.items():
            accuracy = Interval.of(figures(runs, "accuracy", 100).values())
            rounds = Interval.of(figures(runs, "rounds").values())
            numbers = paper.TABLE4.get(dataset, {}).get(psi)
            gain = gains[psi]
            scaled = Interval(gain.mean / best, gain.half and gain.half / best, gain.n) if gain else None
            row = _beside(accuracy, rounds, numbers, grid.whole)
            note = "; ".join(filter(None, (_said(dataset, psi), grid.note(dataset, "flrce-no-stop"))))
            rows.append((paper.label(dataset), grid.request.scale.psi(psi), stops(runs), *row, scaled, note))
    notes = ("A run that psi does not stop counts with all its T rounds.",)
    return Table(f"table4-{grid.regime}", title(grid, "Table 4: the threshold psi"), columns, tuple(rows), notes)


def stops(runs: Mapping[int, Run]) -> str:
    """How many seeds stopped before T."""
    return f"{sum(bool(run.summary['stopped']) for run in runs.values())} of {len(runs)}" if runs else ABSENT


def _said(dataset: str, psi: float) -> str:
    """What the paper says where it gives no number."""
    if dataset not in paper.TABLE4:
        return ""
    if psi in paper.TABLE4[dataset]:
        return "" if paper.TABLE4[dataset][psi] else "paper: N/A, did not stop"
    return "paper: stops too early" if psi < 5 else "paper: does not stop"
