"""The paper's claims, each with a rule that decides it from our runs.

A claim about a mean holds where its whole 95 % interval is on the right side of the line, does not
hold where the whole interval is on the wrong side, and is undecided where the interval reaches over
the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flrce_reproduction import paper
from flrce_reproduction.curves import build_motivation_table
from flrce_reproduction.grid import (
    EFFICIENCY_KEYS,
    FinishedRuns,
    RunsBySeed,
    compute_interval,
    compute_mean_ratio,
    compute_seed_ratios,
    get_values_by_seed,
)
from flrce_reproduction.resources import build_efficiency_table, compute_efficiency_percent
from flrce_reproduction.results import format_stop_count
from flrce_reproduction.tables import (
    NOT_RUN_TEXT,
    PaperTable,
    SeedInterval,
    paired_difference,
    parse_columns,
)

COMPARED_METHODS = (*paper.BASELINES, "flrce")  # the methods of Table 3
MAX_STOP_LOSS_POINTS = 4.0  # points: the most that stopping costs in the paper
MAX_EFFICIENCY_GAP = 1.0  # percentage points within which two efficiencies are the same
STOP_GAIN_DATASETS = ("cifar10", "cifar100")  # where the paper's stop improves the accuracy
STOP_SHARE_DATASETS = ("femnist", "speech")  # where it gives the efficiency without the stop
ClaimVerdict = bool | None  # None: the seeds do not decide it


@dataclass
class JudgedClaim:
    """`verdicts` and `figures` are by data set or baseline; a figure is what the verdict is
    about.
    """

    claim: str
    rule: str
    unit: str
    verdicts: dict[str, ClaimVerdict] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)  # a phrase for each

    def add(self, name: str, verdict: ClaimVerdict, figure: str, seen: str = "") -> None:
        self.verdicts[name], self.figures[name] = verdict, figure
        self.seen.append(seen or f"{name}: {figure} {self.unit}")


VERDICT_NOTE = (
    "*holds*: the whole 95 % interval is on the right side; *does not hold*: the whole interval is"
    " on the wrong side; *undecided*: it reaches over the line. Intervals are for one comparison"
    " each, not for all of them together."
)


def judge_claims(grid: FinishedRuns) -> list[JudgedClaim]:
    """Every claim that our runs can decide."""
    datasets = {*grid.request.datasets}
    per_joule, per_byte = zip(*_judge_with_thresholds(grid, _judge_efficiency_gains), strict=True)
    return [
        *(claim for (claim,) in _judge_with_thresholds(grid, lambda g: (_judge_early_stop(g),))),
        *([_judge_stop_gain(grid)] if datasets & {*STOP_GAIN_DATASETS} else []),
        _judge_accuracy(grid),
        _judge_selection(grid),
        *per_joule,
        *per_byte,
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


def _judge_with_thresholds(
    grid: FinishedRuns, judge: Callable[[FinishedRuns], Sequence[JudgedClaim]]
) -> list[Sequence[JudgedClaim]]:
    """With the paper's threshold for each data set, then with each of PSI_PAIR on all of them."""
    judged = [judge(grid)]
    for psi in paper.PSI_PAIR:
        judged.append(judge(replace(grid, psi=psi)))
        for claim in judged[-1]:
            claim.claim += f", with psi = {psi:g} on every data set"
    return judged


def build_claims_table(grid: FinishedRuns) -> PaperTable:
    """Claim, rule, measurement and verdict."""
    rows = [
        (each.claim, each.rule, "; ".join(each.seen) or NOT_RUN_TEXT, format_verdict(each.verdicts))
        for each in judge_claims(grid)
    ]
    columns = "claim|holds if|measured|verdict"
    return grid.make_table("claims", "The paper's claims", columns, rows, VERDICT_NOTE)


def build_summary_table(grids: Sequence[FinishedRuns]) -> PaperTable:
    """Every claim once, with its verdict and figures in each regime."""
    columns = "|".join(["claim", "figure", *(REGIME_LABELS[grid.regime] for grid in grids)])
    rows = tuple(
        (same[0].claim, same[0].unit, *(format_figures(claim) for claim in same))
        for same in zip(*map(judge_claims, grids), strict=True)
    )
    title = replace(grids[0], regime="").format_title("The paper's claims")
    title = title.replace("regime ", "both regimes")
    return PaperTable("claims", title, parse_columns(columns), rows, (VERDICT_NOTE,))


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


def format_verdict(judged: Mapping[str, ClaimVerdict]) -> str:
    """In one phrase; nothing judged is not yet run."""
    phrases = {
        word: ", ".join(name for name, value in judged.items() if value is verdict)
        for verdict, word in VERDICT_WORDS.items()
        if verdict in judged.values()
    }
    if len(phrases) < 2:
        return next(iter(phrases), NOT_RUN_TEXT)
    return "; ".join(f"{word} for {names}" for word, names in phrases.items())


def is_below(value: SeedInterval, bound: float) -> ClaimVerdict:
    """Whether the whole interval lies below the bound."""
    above = value.is_above(bound)
    return None if above is None else not above


def _judge_early_stop(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "Fewer rounds at equal accuracy (44 to 63 of 100)",
        "every seed stops before T, and the interval of what that costs ends above"
        f" -{MAX_STOP_LOSS_POINTS:g} points",
        "points, with minus without",
    )
    for dataset in grid.request.datasets:
        label, gap = paper.get_dataset_label(dataset), _compute_stop_loss(grid, dataset)
        runs = grid.get_runs(dataset, "flrce")
        rounds, stops = compute_interval(runs, "rounds"), f"{format_stop_count(runs)} seeds"
        if gap and rounds:
            early = all(run.summary["stopped"] for run in runs.values())
            lost, last = gap.format_interval(1, True), f"round {rounds.format_interval(0)}"
            judged.add(
                label,
                gap.is_above(-MAX_STOP_LOSS_POINTS) if early else False,
                f"{lost} ({last})" if early else f"{lost} ({last}, {stops})",
                f"{label}: {stops}, {last}, {lost} points",
            )
    return judged


def _compute_stop_loss(grid: FinishedRuns, dataset: str) -> SeedInterval | None:
    """Points of accuracy with the stop minus without."""
    return _compare_accuracy(
        grid.get_runs(dataset, "flrce"), grid.get_runs(dataset, "flrce-no-stop")
    )


def _compare_accuracy(ours: RunsBySeed, theirs: RunsBySeed) -> SeedInterval | None:
    """Points of accuracy of ours minus theirs."""
    first, second = (get_values_by_seed(runs, "accuracy", 100) for runs in (ours, theirs))
    return paired_difference(first, second)


def _judge_datasets(
    judged: JudgedClaim,
    datasets: Sequence[str],
    measure: Callable[[str], SeedInterval | None],
    decide: Callable[[str, SeedInterval], ClaimVerdict],
    signed: bool = True,
) -> JudgedClaim:
    """A claim about one figure of each data set."""
    for dataset in datasets:
        if value := measure(dataset):
            label = paper.get_dataset_label(dataset)
            judged.add(label, decide(dataset, value), value.format_interval(1, signed))
    return judged


def _select_datasets(grid: FinishedRuns, names: Sequence[str]) -> list[str]:
    return [dataset for dataset in grid.request.datasets if dataset in names]


def _judge_stop_gain(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "On CIFAR10 and CIFAR100 stopping improves the accuracy",
        "the interval of the accuracy with the stop minus without lies above 0",
        "points",
    )
    datasets = _select_datasets(grid, STOP_GAIN_DATASETS)
    return _judge_datasets(
        judged, datasets, lambda d: _compute_stop_loss(grid, d), lambda _, value: value.is_above(0)
    )


def _judge_selection(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "Selecting important clients reaches a higher accuracy in as many rounds",
        "the interval of FLrce without its stop minus FedAvg, after T rounds, lies above 0",
        "points",
    )

    def measure(dataset: str) -> SeedInterval | None:
        ours, theirs = (grid.get_runs(dataset, name) for name in ("flrce-no-stop", "fedavg"))
        return _compare_accuracy(ours, theirs)

    return _judge_datasets(judged, grid.request.datasets, measure, lambda _, v: v.is_above(0))


def _judge_efficiency_without_stop(grid: FinishedRuns) -> list[JudgedClaim]:
    """The paper's shares of section 4.4, which name EMNIST and speech."""
    datasets, claims = _select_datasets(grid, STOP_SHARE_DATASETS), []
    for what, name in zip(("joule", "byte"), EFFICIENCY_KEYS, strict=True):
        judged = JudgedClaim(
            f"Without the stop the efficiency per {what} is about 45 % (EMNIST) and 55 %"
            " (Google Speech) of that with it",
            "the interval of the share lies below the paper's",
            "% of the efficiency with the stop",
        )

        def measure(dataset: str, name: str = name) -> SeedInterval | None:
            whole, cut = (grid.get_runs(dataset, m) for m in ("flrce-no-stop", "flrce"))
            return compute_mean_ratio(whole, cut, name, 100)

        def decide(dataset: str, value: SeedInterval) -> ClaimVerdict:
            return is_below(value, float(paper.ABLATION[dataset][1]))

        claims.append(_judge_datasets(judged, datasets, measure, decide, signed=False))
    return claims


def _judge_equal_efficiencies(grid: FinishedRuns) -> JudgedClaim:
    """The paper plots the same curve for both, because every round is expected to cost the same."""
    judged = JudgedClaim(
        "Each round costs the same, so efficiency per joule and per byte are equal",
        "the efficiency without the stop as % of that with it differs by at most"
        f" {MAX_EFFICIENCY_GAP:g} point between joules and bytes",
        "points, joules minus bytes",
    )

    def measure(dataset: str) -> SeedInterval | None:
        whole, cut = (grid.get_runs(dataset, name) for name in ("flrce-no-stop", "flrce"))
        shares = (compute_efficiency_percent(whole, cut, name) for name in EFFICIENCY_KEYS)
        return paired_difference(*shares)

    def decide(_: str, value: SeedInterval) -> ClaimVerdict:
        low, high = value.is_above(-MAX_EFFICIENCY_GAP), value.is_above(MAX_EFFICIENCY_GAP)
        if low is True and high is False:
            return True
        return False if low is False or high is True else None

    return _judge_datasets(judged, grid.request.datasets, measure, decide)


def _judge_best_threshold(grid: FinishedRuns) -> JudgedClaim:
    """Per joule, against the other two thresholds of Table 4."""
    judged = JudgedClaim(
        "psi = 5 is the most efficient of 5, 5.5 and 6",
        "the interval of its gain in accuracy per joule over 5.5 and over 6 lies at 0 or above",
        "% over 5.5 and over 6",
    )
    for dataset in grid.request.datasets:
        ratios = [_compare_threshold(grid, dataset, psi) for psi in (5.5, 6.0)]
        gains = [value for value in ratios if value]
        if gains:
            label, verdicts = paper.get_dataset_label(dataset), [v.is_above(0) for v in gains]
            verdict = True if all(verdicts) else False if False in verdicts else None
            shown = " and ".join(value.format_interval(0, True) for value in gains)
            judged.add(label, verdict, shown, f"{label}: {shown} %")
    return judged


def _compare_threshold(grid: FinishedRuns, dataset: str, psi: float) -> SeedInterval | None:
    """How much more accuracy a joule brings with psi = 5 than with another, in %."""
    ratios = compute_seed_ratios(
        grid.get_stopped_runs(dataset, 5.0),
        grid.get_stopped_runs(dataset, psi),
        lambda run: run.summary["computation_efficiency"] or 0.0,
    )
    return SeedInterval.from_values(100 * (ratio - 1) for ratio in ratios.values())


def _judge_low_threshold(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "psi below 5 ends too early, with a low accuracy",
        "the interval of the accuracy with psi = 4.5 minus that with 5 lies below 0",
        "points",
    )

    def measure(dataset: str) -> SeedInterval | None:
        return _compare_accuracy(*(grid.get_stopped_runs(dataset, psi) for psi in (4.5, 5.0)))

    return _judge_datasets(judged, grid.request.datasets, measure, lambda _, v: is_below(v, 0))


def _judge_high_threshold(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "psi above 6 does not stop before T", "no seed stops before T with psi = 6.5", "seeds"
    )
    for dataset in grid.request.datasets:
        label, runs = paper.get_dataset_label(dataset), grid.get_stopped_runs(dataset, 6.5)
        if runs:
            shown = f"{format_stop_count(runs)} stop"
            early = any(run.summary["stopped"] for run in runs.values())
            judged.add(label, not early, shown, f"{label}: {shown}")
    return judged


def _judge_dropout_energy(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "Dropout does not effectively reduce the computation cost",
        "the interval of its energy lies at 90 % of FedAvg's or above",
        "% of FedAvg's energy",
    )

    def measure(dataset: str) -> SeedInterval | None:
        ours, theirs = (grid.get_runs(dataset, method) for method in ("dropout", "fedavg"))
        return compute_mean_ratio(ours, theirs, "joules", 100)

    return _judge_datasets(
        judged, grid.request.datasets, measure, lambda _, v: v.is_above(90), signed=False
    )


def _judge_accuracy(grid: FinishedRuns) -> JudgedClaim:
    """FLrce's place if every open comparison is won, and if every one is lost."""
    judged = JudgedClaim(
        "Most accurate on CIFAR10 and CIFAR100, second on EMNIST and Google Speech",
        "FLrce's place is no worse than in the paper, even if every comparison left open by its"
        " interval is lost",
        "place",
    )
    for dataset in grid.request.datasets:
        means = _compute_method_means(grid, dataset, "accuracy", 100)
        leads = _compare_with_baselines(grid, dataset, "accuracy")
        if not leads:
            continue
        label, printed = paper.get_dataset_label(dataset), paper.TABLE3.get(dataset, {})
        best = 1 + sum(lead is False for lead in leads.values())
        worst = 1 + sum(lead is not True for lead in leads.values())
        limit = _rank_flrce({method: number[0] for method, number in printed.items()})
        settled = worst <= limit or best > limit  # the open comparisons do not matter
        top = max(means, key=lambda method: means[method])
        place = f"{best} of {len(means)}" if best == worst else f"{best} to {worst} of {len(means)}"
        judged.add(
            label,
            worst <= limit if settled else None,
            place,
            f"{label}: {place} (by the mean {_rank_flrce(means)}), best mean {top}"
            f" {means[top]:.1f} %",
        )
    return judged


def _rank_flrce(means: Mapping[str, float]) -> int:
    """FLrce's place among the methods."""
    return 1 + sum(value > means["flrce"] for value in means.values()) if "flrce" in means else 1


def _judge_efficiency_gains(grid: FinishedRuns) -> list[JudgedClaim]:
    table, datasets = build_efficiency_table(grid), grid.request.datasets
    group = "Average" if len(datasets) > 1 else paper.get_dataset_label(datasets[0])
    rows = [row for row in table.rows if row[0] == group and row[1] in paper.BASELINES]
    claims = []
    for what, unit, least in (
        ("computation", "joule", paper.COMPUTATION_GAIN),
        ("communication", "byte", paper.COMMUNICATION_GAIN),
    ):
        judged = JudgedClaim(
            f"At least +{least:g} % {what} efficiency over every baseline",
            f"the interval of the gain over the baseline lies at {least:g} % or above",
            "%, average over data sets",
        )
        column = table.get_column_index(f"FLrce's gain per {unit}, %")
        for method, gain in ((row[1], row[column]) for row in rows):
            if isinstance(gain, SeedInterval):
                shown = gain.format_interval(0, True)
                judged.add(method, gain.is_above(least), shown, f"over {method} {shown} %")
        claims.append(judged)
    return claims


def _judge_lowest_cost(
    grid: FinishedRuns, figure: str, what: str, unit: str, scale: float
) -> JudgedClaim:
    second = " (on CIFAR10 the second least, after Dropout)" if figure == "bytes" else ""
    judged = JudgedClaim(
        f"The least {what}{second}",
        "the paired interval against every other of Table 3's methods lies below 0",
        f"{unit} more than the least of the others",
    )
    for dataset in grid.request.datasets:
        means = _compute_method_means(grid, dataset, figure, scale)
        leads = _compare_with_baselines(grid, dataset, figure)
        if figure == "bytes" and dataset == "cifar10":
            leads.pop("dropout", None)
        if not leads:
            continue
        cheaper = any(lead is True for lead in leads.values())
        undecided = ", ".join(method for method, lead in leads.items() if lead is None)
        label, least = paper.get_dataset_label(dataset), min(means, key=lambda m: means[m])
        shown = f"{label}: {means['flrce']:.3g} {unit}, least {least} {means[least]:.3g}"
        judged.add(
            label,
            None if undecided and not cheaper else not cheaper,
            _format_cost_gap(grid, dataset, figure, scale),
            f"{shown}, open against {undecided}" if undecided else shown,
        )
    return judged


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
    judged = JudgedClaim(
        "psi between 5 and 5.5 stops on every data set",
        "every seed stops before T with both",
        "seeds that stop with 5 and with 5.5",
    )
    for dataset in grid.request.datasets:
        stops = {
            psi: [bool(run.summary["stopped"]) for run in runs.values()]
            for psi in (5.0, 5.5, 6.0)
            if (runs := grid.get_stopped_runs(dataset, psi))
        }
        if stops:
            label, five, more = paper.get_dataset_label(dataset), stops[5.0], stops[5.5]
            shown = ", ".join(f"{psi:g}: {sum(x)}/{len(x)}" for psi, x in stops.items())
            figure = f"{sum(five)} and {sum(more)} of {len(five)}"
            judged.add(label, all(five) and all(more), figure, f"{label}: {shown}")
    return judged


def _judge_dropout(grid: FinishedRuns) -> JudgedClaim:
    judged = JudgedClaim(
        "Dropout fails (8.5 to 21.6 %)",
        "the interval of its accuracy minus half of FLrce's lies below 0",
        "points above half of FLrce's accuracy",
    )
    for dataset in grid.request.datasets:
        ours, theirs = (
            get_values_by_seed(grid.get_runs(dataset, method), "accuracy", 100)
            for method in ("flrce", "dropout")
        )
        gap = paired_difference({seed: value / 2 for seed, value in ours.items()}, theirs)
        if gap:
            label = paper.get_dataset_label(dataset)
            means = _compute_method_means(grid, dataset, "accuracy", 100)
            judged.add(
                label,
                gap.is_above(0),
                replace(gap, mean=-gap.mean).format_interval(1, True),
                f"{label}: {means['dropout']:.1f} % against {means['flrce']:.1f} %",
            )
    return judged


def _judge_motivation(grid: FinishedRuns) -> tuple[JudgedClaim, JudgedClaim]:
    """That skew costs at all, and that it costs as much as the paper says: two claims, for the
    first may hold alone.
    """
    table, limits = build_motivation_table(grid), paper.MOTIVATION_RATIOS
    unit = "bytes per accuracy, non-IID / IID"
    more = JudgedClaim(
        "Under non-IID data baselines need more resources for the same accuracy",
        "the interval of the ratio lies above 1",
        unit,
    )
    least = ", ".join(f"{ratio:g} ({method})" for method, ratio in limits.items())
    rule = "the interval of the ratio lies at that or above"
    much = JudgedClaim(f"They need {least} times as much", rule, unit)
    for row in table.rows:
        if ratio := row[table.get_column_index(unit)]:
            shown = ratio.format_interval(2)
            more.add(row[0], ratio.is_above(1), shown, f"{row[0]} {shown}")
            much.add(row[0], ratio.is_above(limits[row[0]]), shown, f"{row[0]} {shown}")
    return more, much


def _compute_method_means(
    grid: FinishedRuns, dataset: str, figure: str, scale: float
) -> dict[str, float]:
    means = {
        method: compute_interval(grid.get_runs(dataset, method), figure, scale)
        for method in COMPARED_METHODS
    }
    return {method: value.mean for method, value in means.items() if value}


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
