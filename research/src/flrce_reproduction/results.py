"""Tables 3 and 4 beside the paper's numbers."""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.grid import (
    EFFICIENCY_KEYS,
    FinishedRuns,
    RunsBySeed,
    compute_interval,
    get_values_by_seed,
    subtract_paper_value,
)
from flrce_reproduction.plan import SHOWN_METHODS
from flrce_reproduction.tables import NOT_RUN_TEXT, PaperTable, SeedInterval, paired_difference

ValuesByMethod = Mapping[str, Mapping[int, float]]  # method -> seed -> value
TABLE3_COLUMNS = (
    "data set|method|accuracy %:2|paper %:2|difference:+2|rounds|paper rounds:0"
    "|difference in rounds:+1|FLrce minus this, points:+2|FLrce without stop minus this:+2|note"
)
TABLE4_COLUMNS = (
    "data set|psi|stopped|accuracy %:2|paper %:2|difference:+2|round|paper round:0"
    "|difference in rounds:+1|acc/kJ, best = 1:3|acc/GB, best = 1:3|note"
)


def build_table3(grid: FinishedRuns) -> PaperTable:
    """Final accuracy and rounds of every method (Table 3)."""
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        runs = {method: grid.get_runs(dataset, method) for method in SHOWN_METHODS}
        accuracy, rounds = (
            {method: get_values_by_seed(found, name, scale) for method, found in runs.items()}
            for name, scale in (("accuracy", 100.0), ("rounds", 1.0))
        )
        notes = {method: grid.describe_row(dataset, method) for method in SHOWN_METHODS}
        label, numbers = paper.get_dataset_label(dataset), paper.TABLE3.get(dataset, {})
        rows += _build_method_rows(grid, label, accuracy, rounds, numbers, notes.__getitem__)
    if set(grid.request.datasets) == set(paper.PAPER_SETTINGS):
        accuracy = _mean_over_datasets(grid, "accuracy", 100)
        rows += _build_method_rows(
            grid,
            "Average",
            accuracy,
            _mean_over_datasets(grid, "rounds"),
            paper.TABLE3_AVERAGE,
            lambda m: "over seeds present in all four" if accuracy[m] else NOT_RUN_TEXT,
        )
    return grid.make_table(
        "table3",
        "Table 3: accuracy and rounds",
        TABLE3_COLUMNS,
        rows,
        "`flrce` is `flrce-no-stop` cut in the round in which its rule fires; until then the two"
        " are one run.",
    )


def _build_method_rows(
    grid: FinishedRuns,
    label: str,
    accuracy: ValuesByMethod,
    rounds: ValuesByMethod,
    numbers: Mapping[str, tuple[float, int]],
    describe: Callable[[str], str],
) -> list[tuple[Any, ...]]:
    """A row for each method; FLrce minus it, with its stop and without, is taken seed by seed."""
    rows = []
    for method in SHOWN_METHODS:
        mean, last = (
            SeedInterval.from_values(part[method].values()) for part in (accuracy, rounds)
        )
        row = _compare_with_paper(grid, mean, last, numbers.get(method))
        gaps = [
            None if method in ("flrce", own) else paired_difference(accuracy[own], accuracy[method])
            for own in ("flrce", "flrce-no-stop")
        ]
        rows.append((label, method, *row, *gaps, describe(method)))
    return rows


def _compare_with_paper(
    grid: FinishedRuns,
    accuracy: SeedInterval | None,
    rounds: SeedInterval | None,
    numbers: tuple[float, int] | None,
) -> tuple[Any, ...]:
    """Ours, the paper's and the difference, of accuracy and of rounds."""
    row: list[Any] = []
    for ours, theirs in zip((accuracy, rounds), numbers or (None, None), strict=True):
        gap = subtract_paper_value(ours, theirs) if grid.has_paper_scale else None
        row += [ours or NOT_RUN_TEXT, theirs, gap]
    return tuple(row)


def _mean_over_datasets(
    grid: FinishedRuns, name: str, scale: float = 1.0
) -> dict[str, dict[int, float]]:
    """Method -> the mean over data sets, for the seeds that are present in all."""
    means = {}
    for method in SHOWN_METHODS:
        values = [
            get_values_by_seed(grid.get_runs(dataset, method), name, scale)
            for dataset in grid.request.datasets
        ]
        seeds = sorted(set.intersection(*map(set, values)))
        means[method] = {seed: fmean(one[seed] for one in values) for seed in seeds}
    return means


def build_table4(grid: FinishedRuns) -> PaperTable:
    """The threshold sweep (Table 4 and its figures), replayed from the runs without a stop."""
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        sweep = {psi: grid.get_stopped_runs(dataset, psi) for psi in paper.PSI_GRID}
        per_joule, per_byte = (_scale_to_best(sweep, name) for name in EFFICIENCY_KEYS)
        note = grid.describe_row(dataset, "flrce-no-stop")
        for psi, runs in sweep.items():
            accuracy, rounds = (
                compute_interval(runs, name, scale)
                for name, scale in (("accuracy", 100.0), ("rounds", 1.0))
            )
            numbers = paper.TABLE4.get(dataset, {}).get(psi)
            row = _compare_with_paper(grid, accuracy, rounds, numbers)
            notes = "; ".join(filter(None, (_describe_paper_result(dataset, psi), note)))
            place = (paper.get_dataset_label(dataset), grid.request.scale.scale_psi(psi))
            efficiencies = (per_joule[psi], per_byte[psi])
            rows.append((*place, format_stop_count(runs), *row, *efficiencies, notes))
    return grid.make_table(
        "table4",
        "Table 4: the threshold psi",
        TABLE4_COLUMNS,
        rows,
        "A run that psi does not stop counts with all its T rounds. Efficiencies are relative to"
        " the best mean of the data set; the paper draws both per psi and says that they are equal"
        " because every round costs the same.",
    )


def _scale_to_best(
    sweep: Mapping[float, RunsBySeed], name: str
) -> dict[float, SeedInterval | None]:
    """An efficiency by psi, divided by the best mean."""
    means = {psi: compute_interval(runs, name) for psi, runs in sweep.items()}
    best = max((value.mean for value in means.values() if value), default=1.0)
    return {psi: value and value.divide_by(best) for psi, value in means.items()}


def format_stop_count(runs: RunsBySeed) -> str:
    """How many seeds stopped before T."""
    if not runs:
        return NOT_RUN_TEXT
    return f"{sum(bool(run.summary['stopped']) for run in runs.values())} of {len(runs)}"


def _describe_paper_result(dataset: str, psi: float) -> str:
    """What the paper says where it gives no number."""
    if dataset not in paper.TABLE4:
        return ""
    if psi in paper.TABLE4[dataset]:
        return "" if paper.TABLE4[dataset][psi] else "paper: N/A, did not stop"
    return "paper: stops too early" if psi < 5 else "paper: does not stop"
