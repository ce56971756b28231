"""Tables 3 and 4 beside the paper's numbers."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.grid import (
    EFFICIENCY_KEYS,
    FinishedRuns,
    get_values_by_seed,
    subtract_paper_value,
)
from flrce_reproduction.plan import SHOWN_METHODS
from flrce_reproduction.records import PaperRun
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    SeedInterval,
    TableColumn,
    paired_difference,
)


def format_title(grid: FinishedRuns, what: str) -> str:
    scale = grid.request.scale
    size = f"M={scale.clients}, P={scale.per_round}, T={scale.rounds}, E={scale.epochs}"
    seeds = len(grid.request.seeds)
    return f"{what}, regime {grid.regime} ({size}, {seeds} seed{'s' if seeds > 1 else ''})"


def build_table3(grid: FinishedRuns) -> PaperTable:
    """Final accuracy and rounds of every method (Table 3)."""
    columns = (
        TableColumn("data set"),
        TableColumn("method"),
        TableColumn("accuracy %", 2),
        TableColumn("paper %", 2),
        TableColumn("difference", 2, True),
        TableColumn("rounds"),
        TableColumn("paper rounds", 0),
        TableColumn("difference in rounds", 1, True),
        TableColumn("FLrce minus this, points", 2, True),
        TableColumn("FLrce without stop minus this", 2, True),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        reference, whole = (
            get_values_by_seed(grid.get_runs(dataset, name), "accuracy", 100)
            for name in ("flrce", "flrce-no-stop")
        )
        for method in SHOWN_METHODS:
            ours = get_values_by_seed(grid.get_runs(dataset, method), "accuracy", 100)
            rounds = SeedInterval.from_values(
                get_values_by_seed(grid.get_runs(dataset, method), "rounds").values()
            )
            numbers = paper.TABLE3.get(dataset, {}).get(method)
            gaps = _compute_gaps(method, ours, reference, whole)
            row = _compare_with_paper(
                SeedInterval.from_values(ours.values()), rounds, numbers, grid.has_paper_scale
            )
            rows.append(
                (
                    paper.get_dataset_label(dataset),
                    method,
                    *row,
                    *gaps,
                    grid.describe_row(dataset, method),
                )
            )
    rows += _build_average_rows(grid)
    notes = (
        (
            "`flrce` is `flrce-no-stop` cut in the round in which its rule fires; until then the"
            " two are one run."
        ),
    )
    return PaperTable(
        f"table3-{grid.regime}",
        format_title(grid, "Table 3: accuracy and rounds"),
        columns,
        tuple(rows),
        notes,
    )


def _compute_gaps(
    method: str, ours: Mapping[int, float], stopped: Mapping[int, float], whole: Mapping[int, float]
) -> tuple[SeedInterval | None, SeedInterval | None]:
    """FLrce minus a method, with its stop and without, seed by seed; the second is what selection
    alone does.
    """
    if method == "flrce":
        return None, None
    return paired_difference(stopped, ours), (
        None if method == "flrce-no-stop" else paired_difference(whole, ours)
    )


def _compare_with_paper(
    accuracy: SeedInterval | None,
    rounds: SeedInterval | None,
    numbers: tuple[float, int] | None,
    whole: bool,
) -> tuple[Any, ...]:
    """Ours, the paper's and the difference, of accuracy and of rounds."""
    theirs = numbers if numbers else (None, None)
    near = theirs if whole else (None, None)
    return (
        accuracy or NOT_RUN_TEXT,
        theirs[0],
        subtract_paper_value(accuracy, near[0]),
        rounds or NOT_RUN_TEXT,
        theirs[1],
        subtract_paper_value(rounds, near[1]),
    )


def _build_average_rows(grid: FinishedRuns) -> list[tuple[Any, ...]]:
    """The paper's last row: means over its four data sets, here seed by seed."""
    if set(grid.request.datasets) != set(paper.PAPER_SETTINGS):
        return []
    rows: list[tuple[Any, ...]] = []
    reference, whole = (
        _mean_over_datasets(grid, name, "accuracy", 100) for name in ("flrce", "flrce-no-stop")
    )
    for method in SHOWN_METHODS:
        ours, rounds = (
            _mean_over_datasets(grid, method, "accuracy", 100),
            _mean_over_datasets(grid, method, "rounds"),
        )
        row = _compare_with_paper(
            SeedInterval.from_values(ours.values()),
            SeedInterval.from_values(rounds.values()),
            paper.TABLE3_AVERAGE.get(method),
            grid.has_paper_scale,
        )
        gaps = _compute_gaps(method, ours, reference, whole)
        rows.append(
            (
                "Average",
                method,
                *row,
                *gaps,
                "over seeds present in all four" if ours else NOT_RUN_TEXT,
            )
        )
    return rows


def _mean_over_datasets(
    grid: FinishedRuns, method: str, name: str, scale: float = 1.0
) -> dict[int, float]:
    each = [
        get_values_by_seed(grid.get_runs(dataset, method), name, scale)
        for dataset in grid.request.datasets
    ]
    seeds = set.intersection(*(set(found) for found in each))
    return {seed: fmean(found[seed] for found in each) for seed in sorted(seeds)}


def build_table4(grid: FinishedRuns) -> PaperTable:
    """The threshold sweep (Table 4 and its figures), replayed from the runs without a stop."""
    columns = (
        TableColumn("data set"),
        TableColumn("psi"),
        TableColumn("stopped"),
        TableColumn("accuracy %", 2),
        TableColumn("paper %", 2),
        TableColumn("difference", 2, True),
        TableColumn("round"),
        TableColumn("paper round", 0),
        TableColumn("difference in rounds", 1, True),
        TableColumn("acc/kJ, best = 1", 3),
        TableColumn("acc/GB, best = 1", 3),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        sweep = {psi: grid.get_stopped_runs(dataset, psi) for psi in paper.PSI_GRID}
        per_joule, per_byte = (_scale_to_best(sweep, name) for name in EFFICIENCY_KEYS)
        for psi, runs in sweep.items():
            accuracy = SeedInterval.from_values(get_values_by_seed(runs, "accuracy", 100).values())
            rounds = SeedInterval.from_values(get_values_by_seed(runs, "rounds").values())
            numbers = paper.TABLE4.get(dataset, {}).get(psi)
            row = _compare_with_paper(accuracy, rounds, numbers, grid.has_paper_scale)
            note = "; ".join(
                filter(
                    None,
                    (
                        _describe_paper_result(dataset, psi),
                        grid.describe_row(dataset, "flrce-no-stop"),
                    ),
                )
            )
            rows.append(
                (
                    paper.get_dataset_label(dataset),
                    grid.request.scale.scale_psi(psi),
                    format_stop_count(runs),
                    *row,
                    per_joule[psi],
                    per_byte[psi],
                    note,
                )
            )
    notes = (
        "A run that psi does not stop counts with all its T rounds. Efficiencies are relative to"
        " the best mean of the data set; the paper draws both per psi and says that they are equal"
        " because every round costs the same.",
    )
    return PaperTable(
        f"table4-{grid.regime}",
        format_title(grid, "Table 4: the threshold psi"),
        columns,
        tuple(rows),
        notes,
    )


def _scale_to_best(
    sweep: Mapping[float, Mapping[int, PaperRun]], name: str
) -> dict[float, SeedInterval | None]:
    """An efficiency by psi, divided by the best mean."""
    found = {
        psi: SeedInterval.from_values(get_values_by_seed(runs, name).values())
        for psi, runs in sweep.items()
    }
    best = max((value.mean for value in found.values() if value), default=1.0)
    return {
        psi: SeedInterval(value.mean / best, value.half and value.half / best, value.n)
        if value
        else None
        for psi, value in found.items()
    }


def format_stop_count(runs: Mapping[int, PaperRun]) -> str:
    """How many seeds stopped before T."""
    return (
        f"{sum(bool(run.summary['stopped']) for run in runs.values())} of {len(runs)}"
        if runs
        else NOT_RUN_TEXT
    )


def _describe_paper_result(dataset: str, psi: float) -> str:
    """What the paper says where it gives no number."""
    if dataset not in paper.TABLE4:
        return ""
    if psi in paper.TABLE4[dataset]:
        return "" if paper.TABLE4[dataset][psi] else "paper: N/A, did not stop"
    return "paper: stops too early" if psi < 5 else "paper: does not stop"
