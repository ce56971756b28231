"""The opening of a report: savings, losses, certainty, and why runs ended."""

import math
from collections.abc import Mapping, Sequence

from flrce.core.cost_table import COSTS
from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.metric_format import (
    SHARES,
    format_metric_noun,
    format_metric_value,
    metric_digits,
    metric_unit,
)
from flrce.errors import format_one_line
from flrce.report.endings import describe_endings, get_planned_rounds, has_stopped_early
from flrce.report.selection import describe_reach_of_runs
from flrce.report.tables import (
    RunGroup,
    choose_units,
    get_primary_metric,
    get_summary_values,
    list_result_settings,
)
from flrce.report.tasks import split_key, task_key
from flrce.storage.read import RecordedRun
from flrce.storage.run_notes import compute_sweep_rounds, list_run_notes

BASELINE_RECIPE = "fedavg"
MIN_SAVING_PERCENT = 0.5  # percent: less is no saving
MIN_SAVING_FACTOR = 4.0  # from which a saving is a factor: "97 % less" hides how much it is
MAX_COMPARISONS = 4  # recipes that get a sentence of their own; the table has the others
MAX_LOSS_POINTS = 2.0  # points below the best that the best trade-off may be, of a share
MAX_RELATIVE_LOSS = 0.05  # likewise of another metric's value
SAME_COST = 0.05  # relative difference up to which two costs are the same
MIN_TESTED_SEEDS = 3  # fewer seeds have no interval that could exclude chance


def describe_groups(groups: Sequence[RunGroup]) -> list[str]:
    """The verdict on all the runs of a page in a few sentences, the recipe that matters first."""
    if not any(run.committed_rounds for group in groups for run in group.runs):
        return ["No round is committed yet."]
    sentences: list[str] = []
    for same in split_comparable(groups):
        if len(same) == 1:
            sentences.append(f"{same[0].label} {describe_group(same[0], groups)}")
        else:
            sentences += describe_recipes(same)
    return [*sentences, *format_group_notes(groups)]


def split_comparable(groups: Sequence[RunGroup]) -> list[list[RunGroup]]:
    """The groups in parts that had the same data, metric and split."""
    parts: list[list[RunGroup]] = []
    for group in groups:
        same = next((part for part in parts if is_comparable(part[0], group)), None)
        if same is None:
            parts.append([group])
        else:
            same.append(group)
    return parts


def describe_recipes(groups: Sequence[RunGroup]) -> list[str]:
    """The best trade-off of recipes on the same data, then the others: each that differs from the
    baseline in a sentence, those that do not in one, and which a stop rule ended.
    """
    against = choose_baseline(groups)
    alike = [g for g in groups if g is not against and are_indistinguishable(g, against)]
    if len(alike) == len(groups) - 1:
        return [describe_alike(alike, against), *describe_early_stops(groups)]
    best = choose_trade_off(groups, against)
    apart = [g for g in groups if g not in (best, against, *alike)]
    apart.sort(key=lambda group: -measure_benefit(group, against))
    sentences = [describe_verdict(best, against), f"It {describe_group(best, groups)}"]
    sentences += [describe_comparison(group, against) for group in apart[:MAX_COMPARISONS]]
    if alike := [group for group in alike if group is not best]:
        sentences.append(describe_alike(alike, against))
    return [*sentences, *describe_early_stops([g for g in groups if g is not best])]


def choose_trade_off(groups: Sequence[RunGroup], against: RunGroup) -> RunGroup:
    """The recipe with least energy and traffic (geometric mean) among those near the best."""
    scored = [group for group in groups if group.compute_interval("accuracy").mean is not None]
    if not scored:
        return against
    top = max(scored, key=lambda group: measure_benefit(group, against))
    near = [group for group in scored if -measure_benefit(group, top) <= get_tolerated_loss(top)]
    costs = {group.label: compare_costs(group, against) for group in near}
    least = min(costs.values())
    cheap = [group for group in near if costs[group.label] <= (1 + SAME_COST) * least]
    return max(cheap, key=lambda group: measure_benefit(group, against))


def get_tolerated_loss(group: RunGroup) -> float:
    """What a recipe may lose against the best one, in points, or in units of the metric."""
    if get_primary_metric([group]) in SHARES:
        return MAX_LOSS_POINTS
    return MAX_RELATIVE_LOSS * abs(group.compute_interval("accuracy").mean or 0.0)


def compare_costs(group: RunGroup, against: RunGroup) -> float:
    """A group's energy and traffic as a multiple of another's (geometric mean)."""
    ratios = [
        mine / theirs
        for name in ("joules", "bytes")
        if (mine := group.compute_interval(name).mean)
        and (theirs := against.compute_interval(name).mean)
    ]
    return math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0


def are_indistinguishable(group: RunGroup, against: RunGroup) -> bool:
    """Whether two recipes cost the same and differ in their metric by no more than chance."""
    for name in ("joules", "bytes"):
        mine, theirs = group.compute_interval(name).mean, against.compute_interval(name).mean
        if mine and theirs and abs(mine / theirs - 1) > SAME_COST:
            return False
    apart = metric_difference(group, against)
    if apart.mean is None:
        return True
    few = apart.n < MIN_TESTED_SEEDS or apart.half is None
    return abs(apart.mean) <= (get_tolerated_loss(against) if few else apart.half or 0.0)


def describe_verdict(best: RunGroup, against: RunGroup) -> str:
    """The first sentence: the best trade-off, and by how much."""
    if best is against:
        return (
            f"{best.label} is the best trade-off: no other recipe within"
            f" {format_tolerated_loss(best)} of the best used less energy and traffic."
        )
    text = describe_difference(best, against)
    return f"{best.label} is the best trade-off: against {against.label}, it {text}."


def format_tolerated_loss(group: RunGroup) -> str:
    if get_primary_metric([group]) in SHARES:
        return f"{MAX_LOSS_POINTS:g} points"
    return f"{100 * MAX_RELATIVE_LOSS:g} %"


def describe_alike(groups: Sequence[RunGroup], against: RunGroup) -> str:
    """One sentence for all recipes that cannot be told apart from the baseline."""
    most = max(abs(metric_difference(group, against).mean or 0.0) for group in groups)
    metric = get_primary_metric([against])
    seeds = min(len(group.runs) for group in (*groups, against))
    size = format_difference(metric, most)
    chance = f"differs by at most {size}, which may be chance"
    if seeds < MIN_TESTED_SEEDS:
        chance = f"differs by at most {size}; {seeds} seed{'s' if seeds > 1 else ''} cannot tell"
    named = join_names([group.label for group in groups])
    return (
        f"{named} cannot be told apart from {against.label}: energy and traffic are within"
        f" {100 * SAME_COST:g} %, and the {format_metric_noun(metric)} {chance}."
    )


def describe_early_stops(groups: Sequence[RunGroup]) -> list[str]:
    """Which recipes a rule ended early, one sentence for those that ended alike."""
    ended: dict[str, list[str]] = {}
    for group in groups:
        if any(map(has_stopped_early, group.runs)):
            ended.setdefault(describe_endings(group.runs), []).append(group.label)
    return [f"{join_names(labels)}: {text}." for text, labels in ended.items()]


def join_names(names: Sequence[str]) -> str:
    """Names as a sentence lists them.

    >>> join_names(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def measure_benefit(group: RunGroup, against: RunGroup) -> float:
    """How much better a group's metric is than another's, in points or units; 0 if unknown."""
    difference = metric_difference(group, against).mean or 0.0
    lower = any(record.lower for run in group.runs for record in run.rounds[-1:])
    return -difference if lower else difference


def is_comparable(one: RunGroup, other: RunGroup) -> bool:
    """Whether two recipes had the same data, metric and split."""
    mine, theirs = one.runs[0], other.runs[0]
    return task_key(mine) == task_key(theirs) and split_key(mine) == split_key(theirs)


def format_group_notes(groups: Sequence[RunGroup]) -> list[str]:
    """The notes of all runs, each once, with its recipes unless it is about all."""
    whose: dict[str, list[str]] = {}
    for group in groups:
        notes = [note for run in group.runs for note in collect_run_notes(run)]
        notes += filter(None, [describe_reach_of_runs(group.runs)])
        for note in dict.fromkeys(notes):
            whose.setdefault(note, []).append(group.label)
    some = {
        note: "" if len(labels) == len(groups) else f" on {', '.join(labels)}"
        for note, labels in whose.items()
    }
    return [f"Note{about_whom}: {note}." for note, about_whom in some.items()]


def choose_baseline(groups: Sequence[RunGroup]) -> RunGroup:
    """What the others are compared with: FedAvg, with the fewest own settings."""
    plain = [group for group in groups if group.runs[0].name == BASELINE_RECIPE]
    return min(plain or groups[:1], key=lambda group: len(list_result_settings(group.runs[0])))


def describe_group(group: RunGroup, groups: Sequence[RunGroup]) -> str:
    """One recipe: how far it got, what that took, and how its runs ended."""
    metric, seeds = get_primary_metric([group]), len(group.runs)
    kind = " and ".join(sorted({run.summary["energy"] for run in group.runs}))
    costs = [name for name in ("joules", "bytes") if name != "joules" or kind != "unknown"]
    spent = " and ".join(format_cost(group, name, groups) for name in costs)
    largest = max(map(abs, group.get_values("accuracy")), default=0.0)
    value = (
        group.compute_interval("accuracy")
        .divide_by(metric_unit(metric))
        .format_interval(metric_digits(metric, largest))
    )
    noun = format_metric_noun(metric)
    score = f"{value} % {noun}" if metric in SHARES else f"{noun} {value}"
    over = f"mean over {seeds} seeds" if seeds > 1 else "one seed"
    reached = "was never evaluated" if value == "--" else f"reached {score} ({over})"
    constant = describe_baseline(group.runs[0])
    return (
        f"{reached} for {spent} ({kind} energy); {describe_endings(group.runs)}."
        + f" For comparison: {constant}." * bool(constant)
    )


def format_cost(group: RunGroup, name: str, groups: Sequence[RunGroup]) -> str:
    """A group's cost with its interval, in the unit in which it reads best for all groups."""
    per, unit = choose_units(groups)[name]
    amount = group.compute_interval(name).divide_by(per)
    return f"{amount.format_interval(COSTS[name].digits)} {unit}"


def describe_comparison(group: RunGroup, against: RunGroup) -> str:
    """What a recipe saved against another, at what loss, and how sure that is."""
    return f"Against {against.label}, {group.label} {describe_difference(group, against)}."


def describe_difference(group: RunGroup, against: RunGroup) -> str:
    """The predicate of that sentence; seeds in pairs where both groups have them."""
    saved = " and ".join(
        _format_saving(group.compute_interval(name).mean, against.compute_interval(name).mean, word)
        for name, word in (("joules", "energy"), ("bytes", "traffic"))
    )
    apart, metric = metric_difference(group, against), get_primary_metric([group, against])
    if apart.mean is None:
        return f"used {saved}"
    noun, size = format_metric_noun(metric), format_difference(metric, abs(apart.mean))
    if size.startswith("0.0 "):
        return f"used {saved} at the same {noun} ({describe_certainty(apart, metric)})"
    side = "higher" if apart.mean >= 0 else "lower"
    return f"used {saved}, and its {noun} is {size} {side} ({describe_certainty(apart, metric)})"


def describe_certainty(apart: ConfidenceInterval, metric: str) -> str:
    """Whether a difference may be chance."""
    if apart.half is None or apart.mean is None:
        return "one seed: this may be chance"
    if apart.n < MIN_TESTED_SEEDS:
        return "two seeds are too few to exclude chance"
    half = format_difference(metric, apart.half).removesuffix(" points")
    sure = "more than chance" if abs(apart.mean) > apart.half else "so it may be chance"
    return f"± {half} over {apart.n} seeds, {sure}"


def format_difference(metric: str, size: float) -> str:
    """A difference of a metric: points of a share, else the number."""
    return f"{size:.1f} points" if metric in SHARES else f"{size:.3g}"


def metric_difference(group: RunGroup, against: RunGroup) -> ConfidenceInterval:
    """The headline metric of a group less that of another, shares in points, seed by seed."""
    unit = metric_unit(get_primary_metric([group, against]))
    theirs = {run.seed: get_summary_values(run)["accuracy"] for run in against.runs}
    pairs = [(get_summary_values(run)["accuracy"], theirs.get(run.seed)) for run in group.runs]
    return confidence_interval(
        [(mine - other) / unit for mine, other in pairs if mine is not None and other is not None]
    )


def collect_run_notes(run: RecordedRun) -> tuple[str, ...]:
    """What one should know of a run beyond its figures."""
    if run.recipe is None:
        return ()
    every = int(run.experiment.get("engine", {}).get("eval_every", 1))
    sweep = compute_sweep_rounds(run.recipe, len(run.roster))
    return list_run_notes(
        run.rounds, run.partition, run.recipe.stop, get_planned_rounds(run), every, sweep
    )


def describe_baseline(run: RecordedRun) -> str:
    """The score of a constant prediction by the run's metric; "" where it is not known."""
    baseline, metric = run.partition.get("baseline"), str(run.summary.get("metric", "accuracy"))
    value = baseline.get("metrics", {}).get(metric) if isinstance(baseline, Mapping) else None
    if not isinstance(value, int | float) or not isinstance(baseline, Mapping):
        return ""
    what = format_one_line(baseline.get("predicts", "the same"), 80)
    return (
        f"always predicting {what} gives {format_metric_noun(metric)}"
        f" {format_metric_value(metric, value)}"
    )


def _format_saving(mine: float | None, theirs: float | None, word: str) -> str:
    if not mine or not theirs:
        return f"as much {word}"
    if theirs / mine >= MIN_SAVING_FACTOR:
        return f"{theirs / mine:.3g} times less {word}"
    share = 100 * (1 - mine / theirs)
    if abs(share) < MIN_SAVING_PERCENT:
        return f"as much {word}"
    return f"{abs(share):.0f} % {'less' if share > 0 else 'more'} {word}"
