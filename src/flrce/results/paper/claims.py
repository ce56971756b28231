"""The paper's claims, each with a rule that decides it from our runs."""

from collections.abc import Mapping
from typing import Any

from flrce.results.paper import paper
from flrce.results.paper.curves import motivation
from flrce.results.paper.grid import Grid, figures
from flrce.results.paper.resources import ablation, efficiency
from flrce.results.paper.results import title
from flrce.results.paper.tables import ABSENT, Column, Interval, Table

RIVALS = (*paper.BASELINES, "flrce")  # the methods of Table 3
LOSS = 4.0  # points: the most that stopping costs in the paper
Judged = tuple[str, str, str, Mapping[str, bool]]  # claim, rule, what we see, data set -> whether it holds


def claims(grid: Grid) -> Table:
    """Claim, rule, measurement and verdict."""
    columns = (Column("claim"), Column("holds if"), Column("measured"), Column("verdict"))
    judged = (
        _stops(grid), _accuracy(grid), *_gains(grid), _least(grid, "joules", "energy", "kJ", 1e-3),
        _least(grid, "bytes", "bandwidth", "GB", 1e-9), _threshold(grid), _dropout(grid), _motivation(grid),
    )  # fmt: skip
    rows = tuple((claim, rule, seen or ABSENT, verdict(holds)) for claim, rule, seen, holds in judged)
    return Table(f"claims-{grid.regime}", title(grid, "The paper's claims"), columns, rows)


def verdict(holds: Mapping[str, bool]) -> str:
    """In one phrase; nothing judged is not yet run."""
    if not holds:
        return ABSENT
    kept = [name for name, value in holds.items() if value]
    if len(kept) == len(holds):
        return "holds"
    return f"holds only for {', '.join(kept)}" if kept else "does not hold"


def _stops(grid: Grid) -> Judged:
    seen, holds = [], {}
    table = ablation(grid)
    for row, dataset in zip(table.rows, grid.request.datasets, strict=True):
        runs, gap = grid.of(dataset, "flrce"), row[table.column("difference")]
        if runs and gap:
            rounds = row[table.column("stops in round")]
            early = all(run.summary["stopped"] for run in runs.values())
            holds[row[0]] = early and gap.mean >= -LOSS
            seen.append(f"{row[0]}: {row[1]} seeds, round {rounds.text(0)}, {gap.text(1, True)} points")
    claim = "Fewer rounds at equal accuracy (44 to 63 of 100)"
    rule = f"every seed stops before T, with at most {LOSS:g} points less than without stopping"
    return claim, rule, "; ".join(seen), holds


def _accuracy(grid: Grid) -> Judged:
    ours = {dataset: _means(grid, dataset, "accuracy", 100) for dataset in grid.request.datasets}
    seen, holds = [], {}
    for dataset, means in ours.items():
        if "flrce" in means and len(means) > 1:
            rank = _rank(means)
            limit = _rank({method: number[0] for method, number in paper.TABLE3.get(dataset, {}).items()})
            holds[paper.label(dataset)] = rank <= limit
            best = max(means, key=lambda method: means[method])
            seen.append(f"{paper.label(dataset)}: {rank} of {len(means)}, best {best} {means[best]:.1f} %")
    claim = "Most accurate on CIFAR10 and CIFAR100, second on EMNIST and Google Speech"
    return claim, "FLrce's rank by mean accuracy is no worse than in the paper", "; ".join(seen), holds


def _rank(means: Mapping[str, float]) -> int:
    """FLrce's place among the methods."""
    return 1 + sum(value > means["flrce"] for value in means.values()) if "flrce" in means else 1


def _gains(grid: Grid) -> tuple[Judged, Judged]:
    table = efficiency(grid)
    group = "Average" if len(grid.request.datasets) > 1 else paper.label(grid.request.datasets[0])
    columns = ("FLrce's gain per joule, %", "FLrce's gain per byte, %")
    found = []
    for name, least in zip(columns, (paper.COMPUTATION_GAIN, paper.COMMUNICATION_GAIN), strict=True):
        rows = {row[1]: row[table.column(name)] for row in table.rows if row[0] == group and row[1] in paper.BASELINES}
        gains = {method: value for method, value in rows.items() if isinstance(value, Interval)}
        seen = "; ".join(f"over {method} {value.text(0, True)} %" for method, value in gains.items())
        holds = {method: value.mean >= least for method, value in gains.items()}
        what = "computation" if "joule" in name else "communication"
        rule = f"the mean gain over the baseline is at least {least:g} %"
        found.append((f"At least +{least:g} % {what} efficiency over every baseline", rule, seen, holds))
    return found[0], found[1]


def _least(grid: Grid, figure: str, what: str, unit: str, scale: float) -> Judged:
    seen, holds = [], {}
    for dataset in grid.request.datasets:
        means = _means(grid, dataset, figure, scale)
        if "flrce" in means and len(means) > 1:
            allowed = {"flrce", "dropout"} if figure == "bytes" and dataset == "cifar10" else {"flrce"}
            least = min(means, key=lambda method: means[method])
            holds[paper.label(dataset)] = least in allowed
            seen.append(f"{paper.label(dataset)}: {means['flrce']:.3g} {unit}, least {least} {means[least]:.3g}")
    claim = f"The least {what}" + (" (on CIFAR10 the second least, after Dropout)" if figure == "bytes" else "")
    return claim, "the mean is the lowest of Table 3's methods", "; ".join(seen), holds


def _threshold(grid: Grid) -> Judged:
    seen, holds = [], {}
    for dataset in grid.request.datasets:
        counts = {psi: [bool(run.summary["stopped"]) for run in grid.stopped(dataset, psi).values()]
                  for psi in (5.0, 5.5, 6.0)}  # fmt: skip
        if counts[5.0]:
            holds[paper.label(dataset)] = all(counts[5.0]) and all(counts[5.5])
            shown = ", ".join(f"{psi:g}: {sum(found)}/{len(found)}" for psi, found in counts.items())
            seen.append(f"{paper.label(dataset)}: {shown}")
    rule = "every seed stops before T with both"
    return "psi between 5 and 5.5 stops on every data set", rule, "; ".join(seen), holds


def _dropout(grid: Grid) -> Judged:
    seen, holds = [], {}
    for dataset in grid.request.datasets:
        means = _means(grid, dataset, "accuracy", 100)
        if "flrce" in means and "dropout" in means:
            holds[paper.label(dataset)] = means["dropout"] < means["flrce"] / 2
            seen.append(f"{paper.label(dataset)}: {means['dropout']:.1f} % against {means['flrce']:.1f} %")
    claim = "Dropout fails (8.5 to 21.6 %)"
    return claim, "its mean accuracy is below half of FLrce's", "; ".join(seen), holds


def _motivation(grid: Grid) -> Judged:
    table = motivation(grid)
    column = table.column("bytes per accuracy, non-IID / IID")
    ratios = {row[0]: row[column] for row in table.rows if row[column]}
    seen = "; ".join(f"{method} {ratio.text(2)}" for method, ratio in ratios.items())
    holds = {method: ratio.mean - (ratio.half or 0.0) > 1 for method, ratio in ratios.items()}
    claim = "Under non-IID data baselines need 1.75 to 2.45 times the resources for the same accuracy"
    return claim, "the interval of the ratio lies above 1 (its size is beside it)", seen, holds


def _means(grid: Grid, dataset: str, figure: str, scale: float) -> dict[str, float]:
    found: dict[str, Any] = {
        method: Interval.of(figures(grid.of(dataset, method), figure, scale).values()) for method in RIVALS
    }
    return {method: value.mean for method, value in found.items() if value}
