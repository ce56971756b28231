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
    RunsBySeed,
    compute_interval,
    compute_mean_ratio,
    compute_seed_ratios,
    get_values_by_seed,
    subtract_paper_value,
)
from flrce_reproduction.plan import SHOWN_METHODS
from flrce_reproduction.records import PaperRun
from flrce_reproduction.results import format_stop_count
from flrce_reproduction.tables import NOT_RUN_TEXT, PaperTable, SeedInterval, paired_difference

EFFICIENCY_COLUMNS = (
    "data set|method|acc/kJ:3|acc/GB:3|FLrce's gain per joule, %:+1|FLrce's gain per byte, %:+1"
    "|accuracy per round, FLrce / this:2|paper's:2|note"
)
ABLATION_COLUMNS = (
    "data set|psi|seeds that stop|stops in round|accuracy %:2|without stop %:2|difference:+2"
    "|worst seed:+2|seeds that lose over 1 point|paper|acc/kJ without, % of with"
    "|acc/GB without, % of with|paper |note"
)


def build_energy_table(grid: FinishedRuns) -> PaperTable:
    """Total joules of every method (the paper's figure of energy)."""
    columns = "data set|method|kJ:3|relative to FLrce:2|paper:6|difference:+6|note"
    note = (
        "Joules are modelled for Jetson Nano boards, not measured; the paper's figure gives no"
        " numbers."
    )
    rows = _list_cost_rows(grid, "joules", 1e-3)
    return grid.make_table("fig-energy", "Energy of all clients, kJ", columns, rows, note)


def build_bandwidth_table(grid: FinishedRuns) -> PaperTable:
    """Total bytes of every method (the paper's figure of bandwidth)."""
    columns = (
        "data set|method|GB:6|relative to FLrce:2|computed for the paper's rounds:6|difference:+6"
        "|note"
    )
    note = (
        "The paper's figure gives no numbers; those beside ours follow from its models and rounds."
    )
    rows, subject = _list_cost_rows(grid, "bytes", 1e-9), "Bandwidth: payload up and down, GB"
    return grid.make_table("fig-bandwidth", subject, columns, rows, note)


def _list_cost_rows(grid: FinishedRuns, name: str, scale: float) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        flrce = grid.get_runs(dataset, "flrce")
        computed = paper.PAYLOAD_GIGABYTES.get(dataset, {}) if name == "bytes" else {}
        for method in SHOWN_METHODS:
            runs = grid.get_runs(dataset, method)
            ours, expected = compute_interval(runs, name, scale), computed.get(method)
            gap = subtract_paper_value(ours, expected) if grid.has_paper_scale else None
            said = "figure only" if expected is None else expected
            row = (ours or NOT_RUN_TEXT, compute_mean_ratio(runs, flrce, name), said, gap)
            note = grid.describe_row(dataset, method)
            rows.append((paper.get_dataset_label(dataset), method, *row, note))
    return rows


def build_efficiency_table(grid: FinishedRuns) -> PaperTable:
    """Accuracy per joule and per byte (eqs. 8 and 9), and how far FLrce is ahead of each method."""
    rows: list[tuple[Any, ...]] = []
    for dataset in grid.request.datasets:
        flrce, label = grid.get_runs(dataset, "flrce"), paper.get_dataset_label(dataset)
        for method in SHOWN_METHODS:
            runs = grid.get_runs(dataset, method)
            own = [compute_interval(runs, name) or NOT_RUN_TEXT for name in EFFICIENCY_KEYS]
            gains: list[Any] = [None, None, None]
            if method != "flrce":
                ratios = compute_seed_ratios(flrce, runs, _accuracy_per_round)
                gains = [_relative_gain([flrce], [runs], name) for name in EFFICIENCY_KEYS]
                gains.append(SeedInterval.from_values(ratios.values()))
            said, note = _compute_paper_ratio(dataset, method), grid.describe_row(dataset, method)
            rows.append((label, method, *own, *gains, said, note))
    if len(grid.request.datasets) > 1:
        rows += [_build_average_row(grid, method) for method in SHOWN_METHODS if method != "flrce"]
    return grid.make_table(
        "fig-efficiency",
        "Efficiency",
        EFFICIENCY_COLUMNS,
        rows,
        f"The paper: FLrce gains at least {paper.COMPUTATION_GAIN:g} % per joule and"
        f" {paper.COMMUNICATION_GAIN:g} % per byte on average; its figures are normalised and give"
        " no numbers. Joules are modelled.",
    )


def _build_average_row(grid: FinishedRuns, method: str) -> tuple[Any, ...]:
    ours, theirs = (
        [grid.get_runs(dataset, name) for dataset in grid.request.datasets]
        for name in ("flrce", method)
    )
    gains = [_relative_gain(ours, theirs, name) or NOT_RUN_TEXT for name in EFFICIENCY_KEYS]
    note = "over seeds present in all data sets"
    return ("Average", method, None, None, *gains, None, None, note)


def _relative_gain(
    ours: Sequence[RunsBySeed], theirs: Sequence[RunsBySeed], name: str
) -> SeedInterval | None:
    """FLrce's relative gain in %, averaged over data sets for every seed that is in all of them."""
    ratios = [
        compute_seed_ratios(a, b, lambda run: run.summary[name] or 0.0)
        for a, b in zip(ours, theirs, strict=True)
    ]
    seeds = sorted(set.intersection(*map(set, ratios)))
    return SeedInterval.from_values(100 * (fmean(r[seed] for r in ratios) - 1) for seed in seeds)


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
    rows = [
        _build_ablation_row(grid, dataset, psi)
        for dataset in grid.request.datasets
        for psi in paper.PSI_PAIR
    ]
    subject = "With and without early stopping"
    note = "The paper's own choice is psi = 5.5 for Google Speech and 5 for the others."
    return grid.make_table("fig-ablation", subject, ABLATION_COLUMNS, rows, note)


def _build_ablation_row(grid: FinishedRuns, dataset: str, psi: float) -> tuple[Any, ...]:
    stopped, whole = grid.get_stopped_runs(dataset, psi), grid.get_runs(dataset, "flrce-no-stop")
    ours, theirs = (get_values_by_seed(runs, "accuracy", 100) for runs in (stopped, whole))
    shares = [compute_mean_ratio(whole, stopped, name, 100) for name in EFFICIENCY_KEYS]
    said = paper.ABLATION.get(dataset) if psi == grid.get_psi(dataset) else None
    points, efficiency = said or (None, None)
    gaps = [ours[seed] - theirs[seed] for seed in sorted({*ours} & {*theirs})]
    losers = f"{sum(gap < -1 for gap in gaps)} of {len(gaps)}" if gaps else None
    means = [
        compute_interval(stopped, "rounds"),
        *(SeedInterval.from_values(values.values()) for values in (ours, theirs)),
    ]
    return (
        paper.get_dataset_label(dataset),
        grid.request.scale.scale_psi(psi),
        format_stop_count(stopped),
        *(mean or NOT_RUN_TEXT for mean in means),
        *(paired_difference(ours, theirs), min(gaps, default=None), losers, points),
        *shares,
        efficiency,
        grid.describe_row(dataset, "flrce-no-stop"),
    )


def compute_efficiency_percent(ours: RunsBySeed, theirs: RunsBySeed, name: str) -> dict[int, float]:
    """An efficiency as % of another, seed by seed."""
    ratios = compute_seed_ratios(ours, theirs, lambda run: run.summary[name] or 0.0)
    return {seed: 100 * ratio for seed, ratio in ratios.items()}
