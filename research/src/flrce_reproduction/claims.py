"""The paper's claims, each with a rule that decides it from our runs.

A claim about a mean holds where its whole 95 % interval is on the right side of the line, does not
hold where the whole interval is on the wrong side, and is undecided where the interval reaches over
the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flrce_reproduction import paper
from flrce_reproduction.curves import build_motivation_table
from flrce_reproduction.grid import (
    EFFICIENCY_KEYS,
    FinishedRuns,
    compute_seed_ratios,
    get_values_by_seed,
)
from flrce_reproduction.records import PaperRun
from flrce_reproduction.resources import build_efficiency_table, compute_efficiency_percent
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
MAX_EFFICIENCY_GAP = 1.0  # percentage points within which two efficiencies are the same
STOP_GAIN_DATASETS = ("cifar10", "cifar100")  # where the paper's stop improves the accuracy
STOP_SHARE_DATASETS = ("femnist", "speech")  # where it gives the efficiency without the stop
ClaimVerdict = bool | None  # None: the seeds do not decide it


@dataclass(frozen=True)
class JudgedClaim:
    """`verdicts` and `figures` are by data set or baseline; a figure is what the verdict is
    about.
    """

    claim: str
    rule: str
    seen: str
    verdicts: Mapping[str, ClaimVerdict]
    figures: Mapping[str, str]
    unit: str


VERDICT_NOTE = (
    "*holds*: the whole 95 % interval is on the right side; *does not hold*: the whole interval is"
    " on the wrong side; *undecided*: it reaches over the line. Intervals are for one comparison"
    " each, not for all of them together."
)


def judge_claims(grid: FinishedRuns) -> list[JudgedClaim]:
    """Every claim that our runs can decide."""
    other_psi = [(psi, replace(grid, psi=psi)) for psi in paper.PSI_PAIR]
    datasets = {*grid.request.datasets}
    return [
        _judge_early_stop(grid),
        *(_name_threshold(_judge_early_stop(changed), psi) for psi, changed in other_psi),
        *([_judge_stop_gain(grid)] if datasets & {*STOP_GAIN_DATASETS} else []),
        _judge_accuracy(grid),
        _judge_selection(grid),
        *(
            claim
            for which in range(2)
            for claim in (
                _judge_efficiency_gains(grid)[which],
                *(
                    _name_threshold(_judge_efficiency_gains(changed)[which], psi)
                    for psi, changed in other_psi
                ),
            )
        ),
        *(_judge_efficiency_without_stop(grid) if datasets & {*STOP_SHARE_DATASETS} else []),
        _judge_equal_efficiencies(grid),
        _judge_lowest_cost(grid, "joules", "energy", "kJ", 1e-3),
        _judge_lowest_cost(grid, "bytes", "bandwidth", "GB", 1e-9),
        _judge_threshold(grid),
        _judge_best_threshold(grid),
        _judge_low_threshold(grid),
        _judge_high_threshold(grid),
        _judge_dropout(grid),
        _judge_dropout_energy(grid),
        *_judge_motivation(grid),
    ]


def build_claims_table(grid: FinishedRuns) -> PaperTable:
    """Claim, rule, measurement and verdict."""
    columns = (
        TableColumn("claim"),
        TableColumn("holds if"),
        TableColumn("measured"),
        TableColumn("verdict"),
    )
    rows = tuple(
        (judged.claim, judged.rule, judged.seen or NOT_RUN_TEXT, format_verdict(judged.verdicts))
        for judged in judge_claims(grid)
    )
    return PaperTable(
        f"claims-{grid.regime}",
        format_title(grid, "The paper's claims"),
        columns,
        rows,
        (VERDICT_NOTE,),
    )


def build_summary_table(grids: Sequence[FinishedRuns]) -> PaperTable:
    """Every claim once, with its verdict and figures in each regime."""
    columns = (
        TableColumn("claim"),
        TableColumn("figure"),
        *(TableColumn(REGIME_LABELS[grid.regime]) for grid in grids),
    )
    judged = [judge_claims(grid) for grid in grids]
    rows = tuple(
        (same[0].claim, same[0].unit, *(format_figures(claim) for claim in same))
        for same in zip(*judged, strict=True)
    )
    title = format_title(grids[0], "The paper's claims").replace(
        f"regime {grids[0].regime}", "both regimes"
    )
    return PaperTable("claims", title, columns, rows, (VERDICT_NOTE,))


REGIME_LABELS = {
    "dirichlet": "labels skewed (`dirichlet`)",
    "quantity": "sizes skewed (`quantity`)",
}
VERDICT_WORDS: Mapping[ClaimVerdict, str] = {
    True: "holds",
    None: "undecided",
    False: "does not hold",
}


def format_figures(judged: JudgedClaim) -> str:
    """Verdicts, each with the figures behind it."""
    phrases = []
    for verdict, word in VERDICT_WORDS.items():
        names = [name for name, value in judged.verdicts.items() if value is verdict]
        if names:
            figures = (f"{name} {judged.figures[name]}" for name in names)
            phrases.append(f"**{word}**: {', '.join(figures)}")
    return "; ".join(phrases) or NOT_RUN_TEXT


def _name_threshold(judged: JudgedClaim, psi: float) -> JudgedClaim:
    return replace(judged, claim=f"{judged.claim}, with psi = {psi:g} on every data set")


def format_verdict(judged: Mapping[str, ClaimVerdict]) -> str:
    """In one phrase; nothing judged is not yet run."""
    found = {
        word: [name for name, value in judged.items() if value is which]
        for which, word in VERDICT_WORDS.items()
    }
    phrases = {word: names for word, names in found.items() if names}
    if len(phrases) < 2:
        return next(iter(phrases), NOT_RUN_TEXT)
    return "; ".join(f"{word} for {', '.join(names)}" for word, names in phrases.items())


def _judge_early_stop(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
    for dataset in grid.request.datasets:
        label, gap = paper.get_dataset_label(dataset), _compute_stop_loss(grid, dataset)
        runs = grid.get_runs(dataset, "flrce")
        rounds = SeedInterval.from_values(get_values_by_seed(runs, "rounds").values())
        if gap and rounds:
            early = all(run.summary["stopped"] for run in runs.values())
            holds[label] = gap.is_above(-MAX_STOP_LOSS_POINTS) if early else False
            figures[label] = (
                f"{gap.format_interval(1, True)} (round {rounds.format_interval(0)}"
                + ("" if early else f", {_count_stops(runs)} seeds")
                + ")"
            )
            seen.append(
                f"{label}: {_count_stops(runs)} seeds, round {rounds.format_interval(0)},"
                f" {gap.format_interval(1, True)} points"
            )
    claim = "Fewer rounds at equal accuracy (44 to 63 of 100)"
    rule = (
        "every seed stops before T, and the interval of what that costs ends above"
        f" -{MAX_STOP_LOSS_POINTS:g} points"
    )
    return JudgedClaim(claim, rule, "; ".join(seen), holds, figures, "points, with minus without")


def _count_stops(runs: Mapping[int, PaperRun]) -> str:
    return f"{sum(bool(run.summary['stopped']) for run in runs.values())} of {len(runs)}"


def _compute_stop_loss(grid: FinishedRuns, dataset: str) -> SeedInterval | None:
    """Points of accuracy with the stop minus without."""
    ours, whole = (
        get_values_by_seed(grid.get_runs(dataset, method), "accuracy", 100)
        for method in ("flrce", "flrce-no-stop")
    )
    return paired_difference(ours, whole)


def _judge_datasets(
    grid: FinishedRuns,
    claim: str,
    rule: str,
    unit: str,
    measure: Callable[[str], SeedInterval | None],
    decide: Callable[[str, SeedInterval], ClaimVerdict],
    digits: int = 1,
    signed: bool = True,
    datasets: Sequence[str] = (),
) -> JudgedClaim:
    """A claim about one figure of each data set."""
    found = {
        dataset: value
        for dataset in grid.request.datasets
        if (not datasets or dataset in datasets) and (value := measure(dataset))
    }
    figures = {
        paper.get_dataset_label(dataset): value.format_interval(digits, signed)
        for dataset, value in found.items()
    }
    return JudgedClaim(
        claim,
        rule,
        "; ".join(f"{label}: {text} {unit}" for label, text in figures.items()),
        {paper.get_dataset_label(dataset): decide(dataset, v) for dataset, v in found.items()},
        figures,
        unit,
    )


def _judge_stop_gain(grid: FinishedRuns) -> JudgedClaim:
    return _judge_datasets(
        grid,
        "On CIFAR10 and CIFAR100 stopping improves the accuracy",
        "the interval of the accuracy with the stop minus without lies above 0",
        "points",
        lambda dataset: _compute_stop_loss(grid, dataset),
        lambda _, value: value.is_above(0),
        datasets=STOP_GAIN_DATASETS,
    )


def _judge_selection(grid: FinishedRuns) -> JudgedClaim:
    def measure(dataset: str) -> SeedInterval | None:
        ours, theirs = (
            get_values_by_seed(grid.get_runs(dataset, method), "accuracy", 100)
            for method in ("flrce-no-stop", "fedavg")
        )
        return paired_difference(ours, theirs)

    return _judge_datasets(
        grid,
        "Selecting important clients reaches a higher accuracy in as many rounds",
        "the interval of FLrce without its stop minus FedAvg, after T rounds, lies above 0",
        "points",
        measure,
        lambda _, value: value.is_above(0),
    )


def _judge_efficiency_without_stop(grid: FinishedRuns) -> tuple[JudgedClaim, JudgedClaim]:
    """The paper's shares of section 4.4, which name EMNIST and speech."""
    shares = {dataset: float(paper.ABLATION[dataset][1]) for dataset in STOP_SHARE_DATASETS}

    def decide(dataset: str, value: SeedInterval) -> ClaimVerdict:
        above = value.is_above(shares[dataset])
        return None if above is None else not above

    def judge_share(what: str, name: str) -> JudgedClaim:
        return _judge_datasets(
            grid,
            f"Without the stop the efficiency per {what} is about 45 % (EMNIST) and 55 %"
            " (Google Speech) of that with it",
            "the interval of the share lies below the paper's",
            "% of the efficiency with the stop",
            lambda dataset: SeedInterval.from_values(
                compute_efficiency_percent(
                    grid.get_runs(dataset, "flrce-no-stop"), grid.get_runs(dataset, "flrce"), name
                ).values()
            ),
            decide,
            signed=False,
            datasets=STOP_SHARE_DATASETS,
        )

    return judge_share("joule", EFFICIENCY_KEYS[0]), judge_share("byte", EFFICIENCY_KEYS[1])


def _judge_equal_efficiencies(grid: FinishedRuns) -> JudgedClaim:
    """The paper plots the same curve for both, because every round is expected to cost the same."""

    def measure(dataset: str) -> SeedInterval | None:
        whole, cut = grid.get_runs(dataset, "flrce-no-stop"), grid.get_runs(dataset, "flrce")
        per_joule, per_byte = EFFICIENCY_KEYS
        return paired_difference(
            compute_efficiency_percent(whole, cut, per_joule),
            compute_efficiency_percent(whole, cut, per_byte),
        )

    def decide(_: str, value: SeedInterval) -> ClaimVerdict:
        low, high = value.is_above(-MAX_EFFICIENCY_GAP), value.is_above(MAX_EFFICIENCY_GAP)
        if low is True and high is False:
            return True
        return False if low is False or high is True else None

    return _judge_datasets(
        grid,
        "Each round costs the same, so efficiency per joule and per byte are equal",
        "the efficiency without the stop as % of that with it differs by at most"
        f" {MAX_EFFICIENCY_GAP:g} point between joules and bytes",
        "points, joules minus bytes",
        measure,
        decide,
    )


def _judge_best_threshold(grid: FinishedRuns) -> JudgedClaim:
    """Per joule, against the other two thresholds of Table 4."""
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
    for dataset in grid.request.datasets:
        label = paper.get_dataset_label(dataset)
        ratios = {psi: _compare_threshold(grid, dataset, psi) for psi in (5.5, 6.0)}
        gains = {psi: value for psi, value in ratios.items() if value}
        if gains:
            verdicts = [value.is_above(0) for value in gains.values()]
            holds[label] = (
                True if all(verdicts) else False if any(v is False for v in verdicts) else None
            )
            figures[label] = " and ".join(v.format_interval(0, True) for v in gains.values())
            seen.append(f"{label}: {figures[label]} %")
    return JudgedClaim(
        "psi = 5 is the most efficient of 5, 5.5 and 6",
        "the interval of its gain in accuracy per joule over 5.5 and over 6 lies at 0 or above",
        "; ".join(seen),
        holds,
        figures,
        "% over 5.5 and over 6",
    )


def _compare_threshold(grid: FinishedRuns, dataset: str, psi: float) -> SeedInterval | None:
    """How much more accuracy a joule brings with psi = 5 than with another, in %."""
    ratios = compute_seed_ratios(
        grid.get_stopped_runs(dataset, 5.0),
        grid.get_stopped_runs(dataset, psi),
        lambda run: run.summary["computation_efficiency"] or 0.0,
    )
    return SeedInterval.from_values(100 * (ratio - 1) for ratio in ratios.values())


def _judge_low_threshold(grid: FinishedRuns) -> JudgedClaim:
    def measure(dataset: str) -> SeedInterval | None:
        low, five = (
            get_values_by_seed(grid.get_stopped_runs(dataset, psi), "accuracy", 100)
            for psi in (4.5, 5.0)
        )
        return paired_difference(low, five)

    def decide(_: str, value: SeedInterval) -> ClaimVerdict:
        above = value.is_above(0)
        return None if above is None else not above

    return _judge_datasets(
        grid,
        "psi below 5 ends too early, with a low accuracy",
        "the interval of the accuracy with psi = 4.5 minus that with 5 lies below 0",
        "points",
        measure,
        decide,
    )


def _judge_high_threshold(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
    for dataset in grid.request.datasets:
        label, runs = paper.get_dataset_label(dataset), grid.get_stopped_runs(dataset, 6.5)
        if runs:
            figures[label] = f"{_count_stops(runs)} stop"
            holds[label] = not any(run.summary["stopped"] for run in runs.values())
            seen.append(f"{label}: {figures[label]}")
    return JudgedClaim(
        "psi above 6 does not stop before T",
        "no seed stops before T with psi = 6.5",
        "; ".join(seen),
        holds,
        figures,
        "seeds",
    )


def _judge_dropout_energy(grid: FinishedRuns) -> JudgedClaim:
    def measure(dataset: str) -> SeedInterval | None:
        ratios = compute_seed_ratios(
            grid.get_runs(dataset, "dropout"),
            grid.get_runs(dataset, "fedavg"),
            lambda run: run.summary["joules"],
        )
        return SeedInterval.from_values(100 * ratio for ratio in ratios.values())

    return _judge_datasets(
        grid,
        "Dropout does not effectively reduce the computation cost",
        "the interval of its energy lies at 90 % of FedAvg's or above",
        "% of FedAvg's energy",
        measure,
        lambda _, value: value.is_above(90),
        signed=False,
    )


def _judge_accuracy(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
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
            figures[paper.get_dataset_label(dataset)] = f"{place} of {len(means)}"
    claim = "Most accurate on CIFAR10 and CIFAR100, second on EMNIST and Google Speech"
    rule = (
        "FLrce's place is no worse than in the paper, even if every comparison left open by its"
        " interval is lost"
    )
    return JudgedClaim(claim, rule, "; ".join(seen), holds, figures, "place")


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
            JudgedClaim(
                f"At least +{least:g} % {what} efficiency over every baseline",
                rule,
                seen,
                holds,
                {method: value.format_interval(0, True) for method, value in gains.items()},
                "%, average over data sets",
            )
        )
    return found[0], found[1]


def _judge_lowest_cost(
    grid: FinishedRuns, figure: str, what: str, unit: str, scale: float
) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
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
            figures[paper.get_dataset_label(dataset)] = _format_cost_gap(
                grid, dataset, figure, scale
            )
    claim = f"The least {what}" + (
        " (on CIFAR10 the second least, after Dropout)" if figure == "bytes" else ""
    )
    return JudgedClaim(
        claim,
        "the paired interval against every other of Table 3's methods lies below 0",
        "; ".join(seen),
        holds,
        figures,
        f"{unit} more than the least of the others",
    )


def _format_cost_gap(grid: FinishedRuns, dataset: str, figure: str, scale: float) -> str:
    """FLrce's cost minus that of the cheapest other method (its second cheapest is Dropout's on
    CIFAR10's bandwidth, which the paper exempts).
    """
    means = _compute_method_means(grid, dataset, figure, scale)
    exempt = {"flrce"} | ({"dropout"} if figure == "bytes" and dataset == "cifar10" else set())
    rivals = {method: mean for method, mean in means.items() if method not in exempt}
    least = min(rivals, key=lambda method: rivals[method])
    ours, theirs = (
        get_values_by_seed(grid.get_runs(dataset, method), figure, scale)
        for method in ("flrce", least)
    )
    gap = paired_difference(ours, theirs)
    return f"{gap.format_interval(2, True)} ({least})" if gap else NOT_RUN_TEXT


def _judge_threshold(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
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
            figures[paper.get_dataset_label(dataset)] = (
                f"{sum(counts[5.0])} and {sum(counts[5.5])} of {len(counts[5.0])}"
            )
    return JudgedClaim(
        "psi between 5 and 5.5 stops on every data set",
        "every seed stops before T with both",
        "; ".join(seen),
        holds,
        figures,
        "seeds that stop with 5 and with 5.5",
    )


def _judge_dropout(grid: FinishedRuns) -> JudgedClaim:
    seen: list[str] = []
    holds: dict[str, ClaimVerdict] = {}
    figures: dict[str, str] = {}
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
            figures[paper.get_dataset_label(dataset)] = replace(
                gap, mean=-gap.mean
            ).format_interval(1, True)
    return JudgedClaim(
        "Dropout fails (8.5 to 21.6 %)",
        "the interval of its accuracy minus half of FLrce's lies below 0",
        "; ".join(seen),
        holds,
        figures,
        "points above half of FLrce's accuracy",
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
    least = ", ".join(f"{ratio:g} ({method})" for method, ratio in paper.MOTIVATION_RATIOS.items())
    figures = {method: ratio.format_interval(2) for method, ratio in ratios.items()}
    unit = "bytes per accuracy, non-IID / IID"
    return (
        JudgedClaim(
            "Under non-IID data baselines need more resources for the same accuracy",
            "the interval of the ratio lies above 1",
            seen,
            more,
            figures,
            unit,
        ),
        JudgedClaim(
            f"They need {least} times as much",
            "the interval of the ratio lies at that or above",
            seen,
            much,
            figures,
            unit,
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
