"""What a report opens with: what was saved, at what loss, how sure that is, and why runs ended, in
plain words.
"""

import re
from collections.abc import Mapping, Sequence

from flrce.core.intervals import ConfidenceInterval, confidence_interval
from flrce.core.types import RoundRecord
from flrce.errors import format_one_line
from flrce.report.tables import (
    RunGroup,
    choose_units,
    get_primary_metric,
    get_summary_values,
    list_result_settings,
)
from flrce.report.tasks import split_key, task_key
from flrce.storage import metric_format as words
from flrce.storage.read import RecordedRun
from flrce.storage.run_notes import compute_sweep_rounds, list_run_notes

BASELINE_RECIPE = "fedavg"
PREDICTED_GAIN_PATTERN = re.compile(
    r"[Pp]redicted .* from doubling the rounds|no improvement over (the last )?\d+ (eval|rounds)"
    r"|the model has learnt nothing in"
)
EARLIER_STOP_PATTERN = re.compile(  # a stop with a price, in the words of earlier versions
    r"twice the rounds would bring at most [^<]*< (?P<price>[\d.e+]+)|no rise to be seen|no better"
    r" than untrained"
)
MIN_SAVING_PERCENT = 0.5  # percent: less is no saving
MIN_SAVING_FACTOR = 4.0  # from which a saving is a factor: "97 % less" hides how much it is
MAX_DESCRIBED_GROUPS = 4  # recipes of which each gets its own sentence; of more, the table speaks


def describe_groups(groups: Sequence[RunGroup]) -> list[str]:
    """A few sentences about all the runs of a page."""
    if not any(run.committed_rounds for group in groups for run in group.runs):
        return ["No round is committed yet."]
    first = (
        [f"{group.label} {describe_group(group, groups)}" for group in groups]
        if len(groups) <= MAX_DESCRIBED_GROUPS
        else []
    )
    pairs = []
    for group in groups:
        same = [each for each in groups if is_comparable(each, group)]
        if (against := choose_baseline(same)) is not group:
            pairs.append((group, against))
    pairs.sort(key=lambda pair: -measure_benefit(*pair))
    others = [describe_comparison(*pair) for pair in pairs]
    return [*others, *first, *format_group_notes(groups)]


def measure_benefit(group: RunGroup, against: RunGroup) -> float:
    """How much better a group's metric is than another's, in points or units; 0 if unknown."""
    difference = metric_difference(group, against).mean or 0.0
    lower = any(record.lower for run in group.runs for record in run.rounds[-1:])
    return -difference if lower else difference


def is_comparable(one: RunGroup, other: RunGroup) -> bool:
    """Whether two recipes had the same data, metric and split: else a difference says nothing about
    them.
    """
    mine, theirs = one.runs[0], other.runs[0]
    return task_key(mine) == task_key(theirs) and split_key(mine) == split_key(theirs)


def format_group_notes(groups: Sequence[RunGroup]) -> list[str]:
    """The notes of all runs, each once, with the recipes that it is about where there are
    others.
    """
    whose: dict[str, list[str]] = {}
    for group in groups:
        for note in dict.fromkeys(note for run in group.runs for note in collect_run_notes(run)):
            whose.setdefault(note, []).append(group.label)
    some = {
        note: "" if len(labels) == len(groups) else f" on {', '.join(labels)}"
        for note, labels in whose.items()
    }
    return [f"Note{about_whom}: {note}." for note, about_whom in some.items()]


def choose_baseline(groups: Sequence[RunGroup]) -> RunGroup:
    """What the others are compared with: FedAvg, and of several the one with the fewest settings of
    its own.
    """
    plain = [group for group in groups if group.runs[0].name == BASELINE_RECIPE]
    return min(plain or groups[:1], key=lambda group: len(list_result_settings(group.runs[0])))


def describe_group(group: RunGroup, groups: Sequence[RunGroup]) -> str:
    """One recipe: how far it got, what that took, and how its runs ended."""
    scales, runs = choose_units(groups), group.runs
    judged, seeds = get_primary_metric([group]), len(runs)
    value = (
        group.compute_interval("accuracy")
        .divide_by(words.metric_unit(judged))
        .format_interval(words.metric_digits(judged))
    )
    kind = " and ".join(sorted({run.summary["energy"] for run in runs}))
    spent = " and ".join(
        f"{group.compute_interval(name).divide_by(scales[name][0]).format_interval(digits)}"
        f" {scales[name][1]}"
        for name, digits in (("joules", 1), ("bytes", 2))
        if name != "joules" or kind != "unknown"
    )
    where = "on the clients' hold-outs"
    unit = " %" if judged in words.SHARES else f" ({words.format_metric_name(judged)})"
    reached = "had no model judged" if value == "--" else f"reached {value}{unit} {where}"
    constant = describe_baseline(runs[0])
    reached += f" ({constant})" if constant else ""
    over = f" over {seeds} seeds" if seeds > 1 else " (one seed, so no interval)"
    return f"{reached}{over} for {spent} ({kind} energy); {describe_endings(runs)}."


def describe_endings(runs: Sequence[RecordedRun]) -> str:
    """How the runs of a recipe ended."""
    early = [
        run
        for run in runs
        if run.rounds
        and run.rounds[-1].stop
        and len(run.committed_rounds) < get_planned_rounds(run)
    ]
    if len(runs) == 1:
        return describe_ending(runs[0])
    if not early:
        return (
            "no rule ended a run before its time:"
            f" {format_range([len(run.committed_rounds) for run in runs])} rounds"
        )
    after = format_range([len(run.committed_rounds) for run in early])
    many = f"{len(early)} of {len(runs)} runs stopped early"
    return (
        f"{many}, after {after} of {get_planned_rounds(runs[0])} rounds:"
        f" {explain_stop_reason(early[0])}"
    )


def describe_ending(run: RecordedRun) -> str:
    """How one run ended, in words."""
    T = get_planned_rounds(run)
    if not run.rounds:
        return "no round is committed yet"
    stop = f": {explain_stop_reason(run)}" if run.rounds[-1].stop else ""
    if len(run.committed_rounds) >= T:
        return f"ran all {T} rounds" + (
            f"; its stop rule was met in the last{stop}" if stop else ""
        )
    return (
        f"stopped after round {len(run.committed_rounds)} of {T}{stop}"
        if stop
        else f"unfinished: {len(run.committed_rounds)} of {T} rounds"
    )


def explain_stop_reason(run: RecordedRun) -> str:
    """Why a rule ended the run, without its jargon."""
    stop = run.rounds[-1].stop if run.rounds else ""
    which = get_stop_criterion(run)
    if which == "headway":
        rounds = stop.rpartition(" over ")[2]
        return (
            f"its rounds had begun to undo one another (mean headway of the last {rounds} below its"
            " limit)"
        )
    if which == "conflicts":
        last = run.committed_rounds[-1]
        peers = max(len(last.replied) - 1, 0)
        return (
            f"the chosen clients pulled against one another ({run.count_conflicts(last):.1f} of"
            f" {peers} peers on average)"
        )
    if which == "gain":
        return reword_gain(stop)
    if "budget" in stop:
        reason = stop.partition(" (")[0]
        return reason.replace("next round would pass", "one more round would have passed its")
    if stop.startswith("no gain of "):
        return (
            f"its {words.format_metric_name(run.summary.get('metric', 'accuracy')).lower()} had"
            " stopped improving"
        )
    return stop


def reword_gain(stop: str) -> str:
    """What a stop with a price says; runs of earlier versions say it in other words."""
    found = EARLIER_STOP_PATTERN.match(stop)
    if not found:
        return stop
    if found["price"]:
        return f"doubling the rounds was predicted to gain less than {found['price']} points"
    return "doubling the rounds was predicted to gain less than their price"


def get_stop_criterion(run: RecordedRun) -> str:
    """The quantity on which the stop was decided: headway, conflicts, gain, or "" for budgets and
    the like.
    """
    stop = run.rounds[-1].stop if run.rounds else ""
    if EARLIER_STOP_PATTERN.match(stop) or PREDICTED_GAIN_PATTERN.match(stop):
        return "gain"
    return next((name for name in ("headway", "conflicts") if stop.startswith(name)), "")


def describe_comparison(group: RunGroup, against: RunGroup) -> str:
    """What a recipe saved against another, at what loss, and how sure that is: seeds in pairs where
    both have them.
    """
    saved = " and ".join(
        _format_saving(mine.mean, theirs.mean, word)
        for word, mine, theirs in (
            ("energy", group.compute_interval("joules"), against.compute_interval("joules")),
            ("traffic", group.compute_interval("bytes"), against.compute_interval("bytes")),
        )
    )
    apart = metric_difference(group, against)
    if apart.mean is None:
        return f"Against {against.label}, {group.label} used {saved}."
    judged = get_primary_metric([group, against])
    share = judged in words.SHARES
    digits = ".1f" if share else ".3g"
    size = f"{abs(apart.mean):{digits}}{' points' if share else ''}"
    half = "" if apart.half is None else f"{apart.half:{digits}}"
    points = f"{size} {'higher' if apart.mean >= 0 else 'lower'}"
    if apart.half is None:
        sure = "one seed: this may be chance"
    elif apart.n == 2:
        sure = "two seeds are too few to exclude chance"
    elif abs(apart.mean) > apart.half:
        sure = f"± {half} over {apart.n} seeds, more than chance"
    else:
        sure = f"± {half} over {apart.n} seeds, so it may be chance"
    called = (
        words.format_metric_name(judged).lower()
        if judged == "accuracy"
        else words.format_metric_name(judged)
    )
    if points.startswith("0.0 "):
        return f"Against {against.label}, {group.label} used {saved} at the same {called} ({sure})."
    return (
        f"Against {against.label}, {group.label} used {saved}, and its {called} is {points}"
        f" ({sure})."
    )


def metric_difference(group: RunGroup, against: RunGroup) -> ConfidenceInterval:
    """The headline metric of a group less that of another, shares in points, seed by seed."""
    unit = words.metric_unit(get_primary_metric([group, against]))
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
    found, metric = run.partition.get("baseline"), str(run.summary.get("metric", "accuracy"))
    value = found.get("metrics", {}).get(metric) if isinstance(found, Mapping) else None
    if not isinstance(value, int | float) or not isinstance(found, Mapping):
        return ""
    what = format_one_line(found.get("predicts", "the same"), 80)
    return (
        f"always predicting {what} gives {words.format_metric_name(metric)}"
        f" {words.format_metric_value(metric, value)}"
    )


def get_planned_rounds(run: RecordedRun) -> int:
    return int(run.experiment.get("rounds", 100))


def describe_state(records: Sequence[RoundRecord], T: int) -> str:
    """In a word or two: "finished" after all T rounds, "stopped early" before, "unfinished" where
    nothing ended it.
    """
    if sum(h.outcome == "committed" for h in records) >= T:
        return "finished"
    stopped = bool(records) and bool(records[-1].stop) and records[-1].outcome != "abandoned"
    return "stopped early" if stopped else "unfinished"


def format_range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _format_saving(mine: float | None, theirs: float | None, word: str) -> str:
    if not mine or not theirs:
        return f"as much {word}"
    if theirs / mine >= MIN_SAVING_FACTOR:
        return f"{theirs / mine:.3g} times less {word}"
    share = 100 * (1 - mine / theirs)
    if abs(share) < MIN_SAVING_PERCENT:
        return f"as much {word}"
    return f"{abs(share):.0f} % {'less' if share > 0 else 'more'} {word}"
