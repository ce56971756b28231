"""The paper's claims, each with a rule that decides it from our runs.

A claim about a mean holds where its whole 95 % interval is on the right side of the line, does not
hold where the whole interval is on the wrong side, and is undecided where the interval reaches over
the line.
"""

from collections.abc import Mapping

from flrce_reproduction import paper
from flrce_reproduction.curves import build_motivation_table
from flrce_reproduction.grid import FinishedRuns, get_values_by_seed
from flrce_reproduction.resources import build_ablation_table, build_efficiency_table
from flrce_reproduction.results import format_title
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    SeedInterval,
    TableColumn,
    paired_difference,
)

COMPARED_METHODS = (*paper.BASELINES, "flrce")  # the methods of Table 3
MAX_STOP_LOSS_POINTS = 4.0  # points: the most that stopping costs in the paper
ClaimVerdict = bool | None  # None: the seeds do not decide it
JudgedClaim = tuple[
    str, str, str, Mapping[str, ClaimVerdict]
]  # claim, rule, what we see, data set or baseline -> verdict
VERDICT_NOTE = (
    "*holds*: the whole 95 % interval is on the right side; *does not hold*: the whole interval is"
    " on the wrong side; *undecided*: it reaches over the line. Intervals are for one comparison"
    " each, not for all of them together."
)


def build_claims_table(grid: FinishedRuns) -> PaperTable:
    """Claim, rule, measurement and verdict."""
    columns = (
        TableColumn("claim"),
        TableColumn("holds if"),
        TableColumn("measured"),
        TableColumn("verdict"),
    )
    judged = (
        _judge_early_stop(grid),
        _judge_accuracy(grid),
        *_judge_efficiency_gains(grid),
        _judge_lowest_cost(grid, "joules", "energy", "kJ", 1e-3),
        _judge_lowest_cost(grid, "bytes", "bandwidth", "GB", 1e-9),
        _judge_threshold(grid),
        _judge_dropout(grid),
        *_judge_motivation(grid),
    )
    rows = tuple(
        (claim, rule, seen or NOT_RUN_TEXT, format_verdict(holds))
        for claim, rule, seen, holds in judged
    )
    return PaperTable(
        f"claims-{grid.regime}",
        format_title(grid, "The paper's claims"),
        columns,
        rows,
        (VERDICT_NOTE,),
    )


def format_verdict(judged: Mapping[str, ClaimVerdict]) -> str:
    """In one phrase; nothing judged is not yet run."""
    words = {True: "holds", None: "undecided", False: "does not hold"}
    found = {
        word: [name for name, value in judged.items() if value is which]
        for which, word in words.items()
    }
    phrases = {word: names for word, names in found.items() if names}
    if len(phrases) < 2:
        return next(iter(phrases), NOT_RUN_TEXT)
    return "; ".join(f"{word} for {', '.join(names)}" for word, names in phrases.items())


def _judge_early_stop(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    table = build_ablation_table(grid)
    for row, dataset in zip(table.rows, grid.request.datasets, strict=True):
        runs, gap = grid.get_runs(dataset, "flrce"), row[table.get_column_index("difference")]
        if runs and gap:
            rounds = row[table.get_column_index("stops in round")]
            early = all(run.summary["stopped"] for run in runs.values())
            holds[row[0]] = gap.is_above(-MAX_STOP_LOSS_POINTS) if early else False
            seen.append(
                f"{row[0]}: {row[1]} seeds, round {rounds.format_interval(0)},"
                f" {gap.format_interval(1, True)} points"
            )
    claim = "Fewer rounds at equal accuracy (44 to 63 of 100)"
    rule = (
        "every seed stops before T, and the interval of what that costs ends above"
        f" -{MAX_STOP_LOSS_POINTS:g} points"
    )
    return claim, rule, "; ".join(seen), holds


def _judge_accuracy(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    for dataset in grid.request.datasets:
        means, leads = (
            _compute_method_means(grid, dataset, "accuracy", 100),
            _compare_with_baselines(grid, dataset, "accuracy"),
        )
        if leads:
            best = 1 + sum(
                lead is False for lead in leads.values()
            )  # FLrce's place if every open comparison is won
            worst = 1 + sum(lead is not True for lead in leads.values())
            limit = _rank_flrce(
                {method: number[0] for method, number in paper.TABLE3.get(dataset, {}).items()}
            )
            settled = worst <= limit or best > limit  # the open comparisons do not matter
            holds[paper.get_dataset_label(dataset)] = worst <= limit if settled else None
            top = max(means, key=lambda method: means[method])
            place = f"{best}" if best == worst else f"{best} to {worst}"
            shown = (
                f"{place} of {len(means)} (by the mean {_rank_flrce(means)}), best mean {top}"
                f" {means[top]:.1f} %"
            )
            seen.append(f"{paper.get_dataset_label(dataset)}: {shown}")
    claim = "Most accurate on CIFAR10 and CIFAR100, second on EMNIST and Google Speech"
    rule = (
        "FLrce's place is no worse than in the paper, even if every comparison left open by its"
        " interval is lost"
    )
    return claim, rule, "; ".join(seen), holds


def _rank_flrce(means: Mapping[str, float]) -> int:
    """FLrce's place among the methods."""
    return 1 + sum(value > means["flrce"] for value in means.values()) if "flrce" in means else 1


def _judge_efficiency_gains(grid: FinishedRuns) -> tuple[JudgedClaim, JudgedClaim]:
    table = build_efficiency_table(grid)
    group = (
        "Average"
        if len(grid.request.datasets) > 1
        else paper.get_dataset_label(grid.request.datasets[0])
    )
    columns = ("FLrce's gain per joule, %", "FLrce's gain per byte, %")
    found = []
    for name, least in zip(
        columns, (paper.COMPUTATION_GAIN, paper.COMMUNICATION_GAIN), strict=True
    ):
        rows = {
            row[1]: row[table.get_column_index(name)]
            for row in table.rows
            if row[0] == group and row[1] in paper.BASELINES
        }
        gains = {method: value for method, value in rows.items() if isinstance(value, SeedInterval)}
        seen = "; ".join(
            f"over {method} {value.format_interval(0, True)} %" for method, value in gains.items()
        )
        holds = {method: value.is_above(least) for method, value in gains.items()}
        what = "computation" if "joule" in name else "communication"
        rule = f"the interval of the gain over the baseline lies at {least:g} % or above"
        found.append(
            (f"At least +{least:g} % {what} efficiency over every baseline", rule, seen, holds)
        )
    return found[0], found[1]


def _judge_lowest_cost(
    grid: FinishedRuns, figure: str, what: str, unit: str, scale: float
) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    for dataset in grid.request.datasets:
        means, leads = (
            _compute_method_means(grid, dataset, figure, scale),
            _compare_with_baselines(grid, dataset, figure),
        )
        if figure == "bytes" and dataset == "cifar10":
            leads.pop("dropout", None)
        if leads:
            cheaper = [method for method, lead in leads.items() if lead is True]
            open_ = [method for method, lead in leads.items() if lead is None]
            settled = bool(cheaper) or not open_
            holds[paper.get_dataset_label(dataset)] = not cheaper if settled else None
            least = min(means, key=lambda method: means[method])
            shown = f"{means['flrce']:.3g} {unit}, least {least} {means[least]:.3g}"
            seen.append(
                f"{paper.get_dataset_label(dataset)}: {shown}"
                + (f", open against {', '.join(open_)}" if open_ else "")
            )
    claim = f"The least {what}" + (
        " (on CIFAR10 the second least, after Dropout)" if figure == "bytes" else ""
    )
    return (
        claim,
        "the paired interval against every other of Table 3's methods lies below 0",
        "; ".join(seen),
        holds,
    )


def _judge_threshold(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    for dataset in grid.request.datasets:
        counts = {
            psi: [
                bool(run.summary["stopped"]) for run in grid.get_stopped_runs(dataset, psi).values()
            ]
            for psi in (5.0, 5.5, 6.0)
        }
        if counts[5.0]:
            holds[paper.get_dataset_label(dataset)] = all(counts[5.0]) and all(counts[5.5])
            shown = ", ".join(
                f"{psi:g}: {sum(found)}/{len(found)}" for psi, found in counts.items()
            )
            seen.append(f"{paper.get_dataset_label(dataset)}: {shown}")
    rule = "every seed stops before T with both"
    return "psi between 5 and 5.5 stops on every data set", rule, "; ".join(seen), holds


def _judge_dropout(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    for dataset in grid.request.datasets:
        ours, theirs = (
            get_values_by_seed(grid.get_runs(dataset, method), "accuracy", 100)
            for method in ("flrce", "dropout")
        )
        gap = paired_difference({seed: value / 2 for seed, value in ours.items()}, theirs)
        if gap:
            means = _compute_method_means(grid, dataset, "accuracy", 100)
            holds[paper.get_dataset_label(dataset)] = gap.is_above(0)
            seen.append(
                f"{paper.get_dataset_label(dataset)}: {means['dropout']:.1f} % against"
                f" {means['flrce']:.1f} %"
            )
    claim = "Dropout fails (8.5 to 21.6 %)"
    return (
        claim,
        "the interval of its accuracy minus half of FLrce's lies below 0",
        "; ".join(seen),
        holds,
    )


def _judge_motivation(grid: FinishedRuns) -> tuple[JudgedClaim, JudgedClaim]:
    """That skew costs at all, and that it costs as much as the paper says: two claims, for the
    first may hold alone.
    """
    table = build_motivation_table(grid)
    column = table.get_column_index("bytes per accuracy, non-IID / IID")
    ratios = {row[0]: row[column] for row in table.rows if row[column]}
    seen = "; ".join(f"{method} {ratio.format_interval(2)}" for method, ratio in ratios.items())
    more = {method: ratio.is_above(1) for method, ratio in ratios.items()}
    much = {
        method: ratio.is_above(paper.MOTIVATION_RATIOS[method]) for method, ratio in ratios.items()
    }
    claim = "Under non-IID data baselines need more resources for the same accuracy"
    least = ", ".join(f"{ratio:g} ({method})" for method, ratio in paper.MOTIVATION_RATIOS.items())
    return (
        (claim, "the interval of the ratio lies above 1", seen, more),
        (
            f"They need {least} times as much",
            "the interval of the ratio lies at that or above",
            seen,
            much,
        ),
    )


def _compute_method_means(
    grid: FinishedRuns, dataset: str, figure: str, scale: float
) -> dict[str, float]:
    found = {
        method: SeedInterval.from_values(
            get_values_by_seed(grid.get_runs(dataset, method), figure, scale).values()
        )
        for method in COMPARED_METHODS
    }
    return {method: value.mean for method, value in found.items() if value}


def _compare_with_baselines(
    grid: FinishedRuns, dataset: str, figure: str
) -> dict[str, ClaimVerdict]:
    """Per rival whether FLrce's figure is surely no smaller, surely smaller, or neither; paired by
    seed.
    """
    ours = get_values_by_seed(grid.get_runs(dataset, "flrce"), figure)
    gaps = {
        method: paired_difference(ours, get_values_by_seed(grid.get_runs(dataset, method), figure))
        for method in paper.BASELINES
    }
    return {method: gap.is_above(0) for method, gap in gaps.items() if gap}
