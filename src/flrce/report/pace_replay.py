"""The rounds of a finished run under another pace: how long they would have lasted."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flrce.core.roles import Pace, overrides
from flrce.core.types import Task
from flrce.errors import BadInput
from flrce.storage.read import RecordedRun, get_line_seconds

REPLAY_CAVEAT = (
    "The same clients train the same model in each round. Replies that a pace drops would have"
    " changed the model and who is chosen next: what the model would be worth needs a new run."
)
# outcomes of replies that came whole: they did count, or the recorded pace dropped them
WHOLE_REPLIES = ("useful", "late", "slower than")


@dataclass(frozen=True)
class ReplayedPace:
    """A recorded run under another pace."""

    pace: str
    asked: int  # clients in a round
    seconds: float
    seconds_recorded: float
    joules: float  # with what clients draw while they wait
    joules_recorded: float
    replies: int  # that would have counted
    replies_recorded: int
    short_rounds: int  # with fewer replies than recipe.minimum: they would have been abandoned


def replay_pace(run: RecordedRun, name: str, pace: Pace) -> ReplayedPace:
    """The committed rounds under a pace; BadInput where the record does not say what it needs."""
    why = _explain_unreplayable(run, pace)
    if why:
        raise BadInput(f"--pace {name}: {why}; only a new run can tell")
    lines: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for line in run.costs:
        lines[line["t"]].append(line)
    rounds = [h for h in run.rounds if h.outcome == "committed"]
    least = 1 if run.recipe is None else run.recipe.minimum
    seconds = joules = 0.0
    replies, short, asked = 0, 0, 0
    for h in rounds:
        asked = len(h.chosen)
        keep = pace.max_replies(_find_round_size(pace, asked, name))
        deadline = pace.with_deadline(Task("", 0, h.t, 0)).deadline
        counted, lasted, spent = _replay_round(lines[h.t], keep, deadline, h.seconds)
        seconds, joules = seconds + lasted, joules + h.joules + spent
        replies, short = replies + counted, short + (counted < least)
    return ReplayedPace(
        pace=name,
        asked=asked,
        seconds=seconds,
        seconds_recorded=sum(h.seconds for h in rounds),
        joules=joules,
        joules_recorded=sum(h.joules for h in rounds),
        replies=replies,
        replies_recorded=sum(len(h.replied) for h in rounds),
        short_rounds=short,
    )


def _explain_unreplayable(run: RecordedRun, pace: Pace) -> str:
    """Why no round can be replayed under this pace; "" if the record may allow it."""
    if run.recipe is not None and run.recipe.pace.buffer_size is not None:
        return "tasks of the run went on from round to round"
    if pace.buffer_size is not None:
        return "it lets tasks go on from round to round, so that other clients would be asked"
    if pace.forecast_hours or overrides(pace, Pace, "choose_start_time"):
        return "it moves the start of rounds, when others can be reached"
    if not any(h.outcome == "committed" for h in run.rounds):
        return "the run has no committed rounds"
    return ""


def _find_round_size(pace: Pace, asked: int, name: str) -> int:
    """The most clients P whose replies the pace wants where it asks as many as the record has."""
    for P in range(asked, 0, -1):
        if pace.cohort_size(P, 0) == asked:
            return P
    raise BadInput(
        f"--pace {name}: it asks {asked} clients for no number of replies, as the run did in a"
        " round; only a new run can tell"
    )


def _replay_round(
    lines: Sequence[Mapping[str, Any]], keep: int | None, deadline: float, recorded: float
) -> tuple[int, float, float]:
    """(replies that count, seconds of the round, joules of waiting more than recorded)."""
    whole = [line for line in lines if line["outcome"].startswith(WHOLE_REPLIES)]
    before = sum(
        max((get_line_seconds(line) for line in lines if line["outcome"] == kind), default=0.0)
        for kind in ("asked", "evaluated")
    )
    counted = sorted(s for s in map(get_line_seconds, whole) if s <= deadline)[:keep]
    lasted = counted[-1] if counted else 0.0
    left = [get_line_seconds(line) for line in lines if line["outcome"].startswith("left")]
    enough = keep is not None and len(counted) == keep
    if not enough:
        lasted = max([lasted, *left])
    if any(get_line_seconds(line) > deadline for line in whole):
        lasted = max(lasted, deadline)
    waited = 0.0
    for line in lines:
        if line["outcome"] not in ("asked", "evaluated"):
            own = get_line_seconds(line)
            longer = max(lasted - own, 0.0) - max(recorded - before - own, 0.0)
            waited += line.get("idle_watts", 0.0) * longer
    return len(counted), lasted + before, waited
