"""The figures of energy, bandwidth, efficiency and of stopping or not, as tables beside what the
paper says.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flrce_reproduction import paper
from flrce_reproduction.grid import (
    EFFICIENCY_KEYS,
    FinishedRuns,
    compute_seed_ratios,
    get_values_by_seed,
    subtract_paper_value,
)
from flrce_reproduction.plan import SHOWN_METHODS
from flrce_reproduction.records import PaperRun
from flrce_reproduction.results import format_stop_count, format_title
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    SeedInterval,
    TableColumn,
    paired_difference,
)

NO_NUMBER = "figure only"


def build_cost_table(
    grid: FinishedRuns, name: str, figure: str, unit: str, scale: float
) -> PaperTable:
    """Total joules or bytes of every method (the paper's figures of energy and bandwidth)."""
    computed = figure == "bytes"
    columns = (
        TableColumn("data set"),
        TableColumn("method"),
        TableColumn(unit, 6 if computed else 3),
        TableColumn("relative to FLrce", 2),
        TableColumn("computed for the paper's rounds" if computed else "paper", 6),
        TableColumn("difference", 6, True),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        flrce = grid.get_runs(dataset, "flrce")
        for method in SHOWN_METHODS:
            runs = grid.get_runs(dataset, method)
            ours = SeedInterval.from_values(get_values_by_seed(runs, figure, scale).values())
            expected = paper.PAYLOAD_GIGABYTES.get(dataset, {}).get(method) if computed else None
            relative = SeedInterval.from_values(
                compute_seed_ratios(
                    runs, flrce, lambda run: get_values_by_seed({0: run}, figure)[0]
                ).values()
            )
            gap = subtract_paper_value(ours, expected) if grid.has_paper_scale else None
            said = expected if expected is not None else NO_NUMBER
            rows.append(
                (
                    paper.get_dataset_label(dataset),
                    method,
                    ours or NOT_RUN_TEXT,
                    relative,
                    said,
                    gap,
                    grid.describe_row(dataset, method),
                )
            )
    what = "Bandwidth: payload up and down" if computed else "Energy of all clients"
    notes = (
        (
            (
                "The paper's figure gives no numbers; those beside ours follow from its models and"
                " rounds."
            ),
        )
        if computed
        else (
            (
                "Joules are modelled for Jetson Nano boards, not measured; the paper's figure gives"
                " no numbers."
            ),
        )
    )
    return PaperTable(
        f"{name}-{grid.regime}", format_title(grid, f"{what}, {unit}"), columns, tuple(rows), notes
    )


def build_energy_table(grid: FinishedRuns) -> PaperTable:
    return build_cost_table(grid, "fig-energy", "joules", "kJ", 1e-3)


def build_bandwidth_table(grid: FinishedRuns) -> PaperTable:
    return build_cost_table(grid, "fig-bandwidth", "bytes", "GB", 1e-9)


def build_efficiency_table(grid: FinishedRuns) -> PaperTable:
    """Accuracy per joule and per byte (eqs. 8 and 9), and how far FLrce is ahead of each method."""
    columns = (
        TableColumn("data set"),
        TableColumn("method"),
        TableColumn("acc/kJ", 3),
        TableColumn("acc/GB", 3),
        TableColumn("FLrce's gain per joule, %", 1, True),
        TableColumn("FLrce's gain per byte, %", 1, True),
        TableColumn("accuracy per round, FLrce / this", 2),
        TableColumn("paper's", 2),
        TableColumn("note"),
    )
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        flrce = grid.get_runs(dataset, "flrce")
        for method in SHOWN_METHODS:
            runs = grid.get_runs(dataset, method)
            each = [
                SeedInterval.from_values(get_values_by_seed(runs, name).values())
                for name in EFFICIENCY_KEYS
            ]
            gains = [
                None if method == "flrce" else _relative_gain([flrce], [runs], name)
                for name in EFFICIENCY_KEYS
            ]
            per_round = (
                None
                if method == "flrce"
                else SeedInterval.from_values(
                    compute_seed_ratios(flrce, runs, _accuracy_per_round).values()
                )
            )
            row = (
                *(value or NOT_RUN_TEXT for value in each),
                *gains,
                per_round,
                _compute_paper_ratio(dataset, method),
            )
            rows.append(
                (paper.get_dataset_label(dataset), method, *row, grid.describe_row(dataset, method))
            )
    rows += (
        [_build_average_row(grid, method) for method in SHOWN_METHODS if method != "flrce"]
        if len(grid.request.datasets) > 1
        else []
    )
    notes = (
        (
            f"The paper: FLrce gains at least {paper.COMPUTATION_GAIN:g} % per joule and"
            f" {paper.COMMUNICATION_GAIN:g} % per byte on average; its figures are normalised and"
            " give no numbers. Joules are modelled."
        ),
    )
    return PaperTable(
        f"fig-efficiency-{grid.regime}",
        format_title(grid, "Efficiency"),
        columns,
        tuple(rows),
        notes,
    )


def _build_average_row(grid: FinishedRuns, method: str) -> tuple[Any, ...]:
    ours = [grid.get_runs(dataset, "flrce") for dataset in grid.request.datasets]
    theirs = [grid.get_runs(dataset, method) for dataset in grid.request.datasets]
    gains = [_relative_gain(ours, theirs, name) or NOT_RUN_TEXT for name in EFFICIENCY_KEYS]
    return (
        "Average",
        method,
        None,
        None,
        *gains,
        None,
        None,
        "over seeds present in all data sets",
    )


def _relative_gain(
    ours: Sequence[dict[int, PaperRun]], theirs: Sequence[dict[int, PaperRun]], name: str
) -> SeedInterval | None:
    """FLrce's relative gain in %, averaged over data sets for every seed that is in all of them."""
    each = [
        compute_seed_ratios(a, b, lambda run: run.summary[name] or 0.0)
        for a, b in zip(ours, theirs, strict=True)
    ]
    seeds = sorted(set.intersection(*(set(found) for found in each)))
    return SeedInterval.from_values(
        100 * (fmean(found[seed] for found in each) - 1) for seed in seeds
    )


def _accuracy_per_round(run: PaperRun) -> float:
    return float((run.summary["accuracy"] or 0.0) / max(run.summary["rounds"], 1))


def _compute_paper_ratio(dataset: str, method: str) -> float | None:
    """FLrce's accuracy per round over the method's, from Table 3."""
    numbers = paper.TABLE3.get(dataset, {})
    if method not in numbers or method == "flrce":
        return None
    (ours, rounds), (theirs, others) = numbers["flrce"], numbers[method]
    return (ours / rounds) / (theirs / others)


def build_ablation_table(grid: FinishedRuns) -> PaperTable:
    """FLrce with and without its early stop (section 4.4), with both thresholds of section 4.3."""
    columns = (
        TableColumn("data set"),
        TableColumn("psi"),
        TableColumn("seeds that stop"),
        TableColumn("stops in round"),
        TableColumn("accuracy %", 2),
        TableColumn("without stop %", 2),
        TableColumn("difference", 2, True),
        TableColumn("worst seed", 2, True),
        TableColumn("seeds that lose over 1 point"),
        TableColumn("paper"),
        TableColumn("acc/kJ without, % of with"),
        TableColumn("acc/GB without, % of with"),
        TableColumn("paper "),
        TableColumn("note"),
    )
    rows = tuple(
        _build_ablation_row(grid, dataset, psi)
        for dataset in grid.request.datasets
        for psi in paper.PSI_PAIR
    )
    return PaperTable(
        f"fig-ablation-{grid.regime}",
        format_title(grid, "With and without early stopping"),
        columns,
        rows,
        ("The paper's own choice is psi = 5.5 for Google Speech and 5 for the others.",),
    )


def _build_ablation_row(grid: FinishedRuns, dataset: str, psi: float) -> tuple[Any, ...]:
    with_stop, without = (
        grid.get_stopped_runs(dataset, psi),
        grid.get_runs(dataset, "flrce-no-stop"),
    )
    ours, whole = (
        get_values_by_seed(with_stop, "accuracy", 100),
        get_values_by_seed(without, "accuracy", 100),
    )
    shares = [
        SeedInterval.from_values(compute_efficiency_percent(without, with_stop, name).values())
        for name in EFFICIENCY_KEYS
    ]
    said = paper.ABLATION.get(dataset) if psi == grid.get_psi(dataset) else None
    gaps = [ours[seed] - whole[seed] for seed in sorted({*ours} & {*whole})]
    losers = f"{sum(gap < -1 for gap in gaps)} of {len(gaps)}" if gaps else None
    return (
        paper.get_dataset_label(dataset),
        grid.request.scale.scale_psi(psi),
        format_stop_count(with_stop),
        SeedInterval.from_values(get_values_by_seed(with_stop, "rounds").values()) or NOT_RUN_TEXT,
        SeedInterval.from_values(ours.values()) or NOT_RUN_TEXT,
        SeedInterval.from_values(whole.values()) or NOT_RUN_TEXT,
        paired_difference(ours, whole),
        min(gaps, default=None),
        losers,
        said[0] if said else None,
        *shares,
        said[1] if said else None,
        grid.describe_row(dataset, "flrce-no-stop"),
    )


def compute_efficiency_percent(
    ours: dict[int, PaperRun], theirs: dict[int, PaperRun], name: str
) -> dict[int, float]:
    """An efficiency as % of another, seed by seed."""
    ratios = compute_seed_ratios(ours, theirs, lambda run: run.summary[name] or 0.0)
    return {seed: 100 * ratio for seed, ratio in ratios.items()}
