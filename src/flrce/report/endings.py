"""How runs ended, in plain words, and why."""

import re
from collections.abc import Sequence

from flrce.core.types import RoundRecord
from flrce.storage import metric_format as words
from flrce.storage.read import RecordedRun

PREDICTED_GAIN_PATTERN = re.compile(
    r"[Pp]redicted .* from doubling the rounds|no improvement over (the last )?\d+ (eval|rounds)"
    r"|the model has learnt nothing in"
)
EARLIER_STOP_PATTERN = re.compile(  # a stop with a price, in the words of earlier versions
    r"twice the rounds would bring at most [^<]*< (?P<price>[\d.e+]+)|no rise to be seen|no better"
    r" than untrained"
)


def describe_endings(runs: Sequence[RecordedRun]) -> str:
    """How the runs of a recipe ended."""
    early = [run for run in runs if has_stopped_early(run)]
    if len(runs) == 1:
        return describe_ending(runs[0])
    if not early:
        rounds = format_range([len(run.committed_rounds) for run in runs])
        return f"no stop rule ended a run early ({rounds} rounds)"
    after = format_range([len(run.committed_rounds) for run in early])
    many = f"{len(early)} of {len(runs)} runs stopped early"
    return (
        f"{many}, after {after} of {get_planned_rounds(runs[0])} rounds:"
        f" {explain_stop_reason(early[0])}"
    )


def has_stopped_early(run: RecordedRun) -> bool:
    """Whether something ended a run before its last round."""
    return describe_state(run.rounds, get_planned_rounds(run)) == "stopped early"


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
