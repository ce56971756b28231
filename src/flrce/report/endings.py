"""Describe how and why runs ended."""

import re
from collections.abc import Sequence

from flrce.core.metric_format import format_metric_name
from flrce.core.types import RoundRecord
from flrce.storage.read import RecordedRun

PREDICTED_GAIN_PATTERN = re.compile(
    r"[Pp]redicted .* from doubling the rounds|no improvement over (the last )?\d+ (eval|rounds)"
    r"|the model has (learnt nothing|not improved measurably) in"
)
EARLIER_STOP_PATTERN = re.compile(  # a stop by predicted gain, as earlier versions recorded it
    r"twice the rounds would bring at most [^<]*< (?P<price>[\d.e+]+)|no rise to be seen|no better"
    r" than untrained"
)


def describe_endings(runs: Sequence[RecordedRun]) -> str:
    """How the runs of a recipe ended."""
    if len(runs) == 1:
        return describe_ending(runs[0])
    early = [run for run in runs if has_stopped_early(run)]
    if not early:
        rounds = format_range([len(run.committed_rounds) for run in runs])
        return f"no stop rule ended a run early ({rounds} rounds)"
    rounds = format_range([len(run.committed_rounds) for run in early])
    return (
        f"{len(early)} of {len(runs)} runs stopped early, after {rounds} of"
        f" {get_planned_rounds(runs[0])} rounds: {explain_stop_reason(early[0])}"
    )


def has_stopped_early(run: RecordedRun) -> bool:
    """Whether the run was stopped before its last round."""
    return describe_state(run.rounds, get_planned_rounds(run)) == "stopped early"


def describe_ending(run: RecordedRun) -> str:
    """How one run ended."""
    if not run.rounds:
        return "no round is committed yet"
    T, done = get_planned_rounds(run), len(run.committed_rounds)
    stopped = bool(run.rounds[-1].stop)
    if done >= T:
        met = f"; its stop rule was met in the last round: {explain_stop_reason(run)}"
        return f"ran all {T} rounds" + (met if stopped else "")
    if stopped:
        return f"stopped after round {done} of {T}: {explain_stop_reason(run)}"
    return f"unfinished: {done} of {T} rounds"


def explain_stop_reason(run: RecordedRun) -> str:
    """Why a rule ended the run, without technical terms."""
    stop = run.rounds[-1].stop if run.rounds else ""
    criterion = get_stop_criterion(run)
    if criterion == "headway":
        rounds = stop.rpartition(" over ")[2]
        return (
            "recent rounds undid each other's progress (mean headway of the last"
            f" {rounds} below its limit)"
        )
    if criterion == "conflicts":
        last = run.committed_rounds[-1]
        peers = max(len(last.replied) - 1, 0)
        return (
            f"the updates of the selected clients conflicted ({run.count_conflicts(last):.1f} of"
            f" {peers} peers on average)"
        )
    if criterion == "gain":
        return reword_gain(stop)
    if "budget" in stop:
        reason = stop.partition(" (")[0]
        return reason.replace("next round would pass", "one more round would have exceeded its")
    if stop.startswith("no gain of "):
        metric = format_metric_name(run.summary.get("metric", "accuracy")).lower()
        return f"its {metric} had stopped improving"
    return stop


def describe_stop(run: RecordedRun) -> str:
    """Why a rule ended the run, with the rule's own numbers."""
    stop, reason = run.rounds[-1].stop, explain_stop_reason(run)
    if get_stop_criterion(run) == "gain":
        return reason
    return stop if stop.startswith(reason) else f"{reason} [{stop}]"


def reword_gain(stop: str) -> str:
    """The reason of a stop by predicted gain; earlier versions recorded other words."""
    match = EARLIER_STOP_PATTERN.match(stop)
    if not match:
        return stop
    price = f"{match['price']} points" if match["price"] else "its price"
    return f"doubling the rounds was predicted to gain less than {price}"


def get_stop_criterion(run: RecordedRun) -> str:
    """The quantity that decided the stop: "headway", "conflicts", "gain", or "" for others."""
    stop = run.rounds[-1].stop if run.rounds else ""
    if EARLIER_STOP_PATTERN.match(stop) or PREDICTED_GAIN_PATTERN.match(stop):
        return "gain"
    return next((name for name in ("headway", "conflicts") if stop.startswith(name)), "")


def get_planned_rounds(run: RecordedRun) -> int:
    return int(run.experiment.get("rounds", 100))


def describe_state(records: Sequence[RoundRecord], T: int) -> str:
    """ "finished" after all T rounds, "stopped early" by a rule before that, or "unfinished"."""
    if sum(h.outcome == "committed" for h in records) >= T:
        return "finished"
    stopped = bool(records) and bool(records[-1].stop) and records[-1].outcome != "abandoned"
    return "stopped early" if stopped else "unfinished"


def format_range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"
