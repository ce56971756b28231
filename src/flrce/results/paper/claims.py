"""The paper's claims, each with a rule that decides it from our runs.

A claim about a mean holds where its whole 95 % interval is on the right side of the line, does not hold where the whole
interval is on the wrong side, and is undecided where the interval reaches over the line.
"""

from collections.abc import Mapping

from flrce.results.paper import paper
from flrce.results.paper.curves import motivation
from flrce.results.paper.grid import Grid, figures
from flrce.results.paper.resources import ablation, efficiency
from flrce.results.paper.results import title
from flrce.results.paper.tables import ABSENT, Column, Interval, Table, paired

RIVALS = (*paper.BASELINES, "flrce")  # the methods of Table 3
LOSS = 4.0  # points: the most that stopping costs in the paper
Verdict = bool | None  # None: the seeds do not decide it
Judged = tuple[str, str, str, Mapping[str, Verdict]]  # claim, rule, what we see, data set or baseline -> verdict
NOTE = (
    "*holds*: the whole 95 % interval is on the right side; *does not hold*: the whole interval is on the wrong side; "
    "*undecided*: it reaches over the line. Intervals are for one comparison each, not for all of them together."
)


def claims(grid: Grid) -> Table:
    """Claim, rule, measurement and verdict."""
    columns = (Column("claim"), Column("holds if"), Column("measured"), Column("verdict"))
    judged = (
        _stops(grid), _accuracy(grid), *_gains(grid), _least(grid, "joules", "energy", "kJ", 1e-3),
        _least(grid, "bytes", "bandwidth", "GB", 1e-9), _threshold(grid), _dropout(grid), *_motivation(grid),
    )  # fmt: skip
    rows = tuple((claim, rule, seen or ABSENT, verdict(holds)) for claim, rule, seen, holds in judged)
    return Table(f"claims-{grid.regime}", title(grid, "The paper's claims"), columns, rows, (NOTE,))


def verdict(judged: Mapping[str, Verdict]) -> str:
    """In one phrase; nothing judged is not yet run."""
    words = {True: "holds", None: "undecided", False: "does not hold"}
    found = {word: [name for name, value in judged.items() if value is which] for which, word in words.items()}
    phrases = {word: names for word, names in found.items() if names}
    if len(phrases) < 2:
        return next(iter(phrases), ABSENT)
    return "; ".join(f"{word} for {', '.join(names)}" for word, names in phrases.items())


def _stops(grid: Grid) -> Judged:
    seen: list[str] = []
    holds: dict[str, Verdict] = {}
    table = ablation(grid)
    for row, dataset in zip(table.rows, grid.request.datasets, strict=True):
        runs, gap = grid.of(dataset, "flrce"), row[table.column("difference")]
        if runs and gap:
            rounds = row[table.column("stops in round")]
            early = all(run.summary["stopped"] for run in runs.values())
            holds[row[0]] = gap.above(-LOSS) if early else False
            seen.append(f"{row[0]}: {row[1]} seeds, round {rounds.text(0)}, {gap.text(1, True)} points")
    claim = "Fewer rounds at equal accuracy (44 to 63 of 100)"
    rule = f"every seed stops before T, and the interval of what that costs ends above -{LOSS:g} points"
    return claim, rule, "; ".join(seen), holds


def _accuracy(grid: Grid) -> Judged:
    seen: list[str] = []
    holds: dict[str, Verdict] = {}
    for dataset in grid.request.datasets:
        means, leads = _means(grid, dataset, "accuracy", 100), _leads(grid, dataset, "accuracy")
        if leads:
            best = 1 + sum(lead is False for lead in leads.values())  # FLrce's place if every open comparison is won
            worst = 1 + sum(lead is not True for lead in leads.values())
            limit = _rank({method: number[0] for method, number in paper.TABLE3.get(dataset, {}).items()})
            settled = worst <= limit or best > limit  # the open comparisons do not matter
            holds[paper.label(dataset)] = worst <= limit if settled else None
            top = max(means, key=lambda method: means[method])
            place = f"{best}" if best == worst else f"{best} to {worst}"
            shown = f"{place} of {len(means)} (by the mean {_rank(means)}), best mean {top} {means[top]:.1f} %"
            seen.append(f"{paper.label(dataset)}: {shown}")
    claim = "Most accurate on CIFAR10 and CIFAR100, second on EMNIST and Google Speech"
    rule = "FLrce's place is no worse than in the paper, even if every comparison left open by its interval is lost"
    return claim, rule, "; ".join(seen), holds


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
        holds = {method: value.above(least) for method, value in gains.items()}
        what = "computation" if "joule" in name else "communication"
        rule = f"the interval of the gain over the baseline lies at {least:g} % or above"
        found.append((f"At least +{least:g} % {what} efficiency over every baseline", rule, seen, holds))
    return found[0], found[1]


def _least(grid: Grid, figure: str, what: str, unit: str, scale: float) -> Judged:
    seen: list[str] = []
    holds: dict[str, Verdict] = {}
    for dataset in grid.request.datasets:
        means, leads = _means(grid, dataset, figure, scale), _leads(grid, dataset, figure)
        if figure == "bytes" and dataset == "cifar10":
            leads.pop("dropout", None)
        if leads:
            cheaper = [method for method, lead in leads.items() if lead is True]
            open_ = [method for method, lead in leads.items() if lead is None]
            settled = bool(cheaper) or not open_
            holds[paper.label(dataset)] = not cheaper if settled else None
            least = min(means, key=lambda method: means[method])
            shown = f"{means['flrce']:.3g} {unit}, least {least} {means[least]:.3g}"
            seen.append(f"{paper.label(dataset)}: {shown}" + (f", open against {', '.join(open_)}" if open_ else ""))
    claim = f"The least {what}" + (" (on CIFAR10 the second least, after Dropout)" if figure == "bytes" else "")
    return claim, "the paired interval against every other of Table 3's methods lies below 0", "; ".join(seen), holds


def _threshold(grid: Grid) -> Judged:
    seen: list[str] = []
    holds: dict[str, Verdict] = {}
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
    seen: list[str] = []
    holds: dict[str, Verdict] = {}
    for dataset in grid.request.datasets:
        ours, theirs = (figures(grid.of(dataset, method), "accuracy", 100) for method in ("flrce", "dropout"))
        gap = paired({seed: value / 2 for seed, value in ours.items()}, theirs)
        if gap:
            means = _means(grid, dataset, "accuracy", 100)
            holds[paper.label(dataset)] = gap.above(0)
            seen.append(f"{paper.label(dataset)}: {means['dropout']:.1f} % against {means['flrce']:.1f} %")
    claim = "Dropout fails (8.5 to 21.6 %)"
    return claim, "the interval of its accuracy minus half of FLrce's lies below 0", "; ".join(seen), holds


def _motivation(grid: Grid) -> tuple[Judged, Judged]:
    """That skew costs at all, and that it costs as much as the paper says: two claims, for the first may hold alone."""
    table = motivation(grid)
    column = table.column("bytes per accuracy, non-IID / IID")
    ratios = {row[0]: row[column] for row in table.rows if row[column]}
    seen = "; ".join(f"{method} {ratio.text(2)}" for method, ratio in ratios.items())
    more = {method: ratio.above(1) for method, ratio in ratios.items()}
    much = {method: ratio.above(paper.MOTIVATION[method]) for method, ratio in ratios.items()}
    claim = "Under non-IID data baselines need more resources for the same accuracy"
    least = ", ".join(f"{ratio:g} ({method})" for method, ratio in paper.MOTIVATION.items())
    return (
        (claim, "the interval of the ratio lies above 1", seen, more),
        (f"They need {least} times as much", "the interval of the ratio lies at that or above", seen, much),
    )


def _means(grid: Grid, dataset: str, figure: str, scale: float) -> dict[str, float]:
    found = {method: Interval.of(figures(grid.of(dataset, method), figure, scale).values()) for method in RIVALS}
    return {method: value.mean for method, value in found.items() if value}


def _leads(grid: Grid, dataset: str, figure: str) -> dict[str, Verdict]:
    """Per rival whether FLrce's figure is surely no smaller, surely smaller, or neither; paired by seed."""
    ours = figures(grid.of(dataset, "flrce"), figure)
    gaps = {method: paired(ours, figures(grid.of(dataset, method), figure)) for method in paper.BASELINES}
    return {method: gap.above(0) for method, gap in gaps.items() if gap}
