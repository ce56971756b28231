"""Explain in sentences how the clients of a round were selected, and which could be reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flrce.core.types import RoundRecord
from flrce.rng import make_stream
from flrce.storage.read import RecordedRun

GROUPING_TEXTS = {  # `by` of methods/selection/turns.py
    "balance": "grouped by their last updates",
    "agreement": "that agree most with the others",
    "sizes": "of all sizes",
    "chance": "at random",
}
#: names of the probability to explore in a selector's notes: the paper's phi, Oort's epsilon
EXPLORATION_CHANCES = frozenset({"phi", "epsilon"})
NON_SELECTOR_KEYS = ("reachable", "busy", "unreachable")  # notes that no selector wrote
BUSY = "still at work on an earlier task"


@dataclass(frozen=True)
class RelationshipScores:
    """H of every client before a round."""

    H: NDArray[np.float64]

    @cached_property
    def rank(self) -> dict[int, int]:
        """Client index -> rank by H, from 1; ties go to the lowest index."""
        return {int(k): r + 1 for r, k in enumerate(np.argsort(-self.H, kind="stable"))}

    def describe_client(self, k: int) -> str:
        return f"{self.H[k]:+.2f}, rank {self.rank[k]} of {len(self.H)}"


def compute_scores_before(run: RecordedRun, t: int) -> RelationshipScores | None:
    """H as the selector knew it at the start of round t."""
    if not run.relations:
        return None
    H = np.zeros(len(run.roster))
    for relation in run.relations:
        if relation.t < t:
            H[list(relation.k)] = relation.H
    return RelationshipScores(H)


def recover_selection_draw(run: RecordedRun, h: RoundRecord) -> float | None:
    """The random number that was compared with phi, drawn again from the seed and the round."""
    phi = h.why.get("phi")
    if phi is None:
        return None
    index = next(i for i, other in enumerate(run.rounds) if other is h)
    tries = sum(other.t == h.t and other.outcome == "abandoned" for other in run.rounds[:index])
    draw = float(h.why.get("draw", make_stream(run.seed, f"select{tries or ''}", h.t).random()))
    return draw if (draw < phi) != h.exploit else None


def get_phase(record: RoundRecord) -> str:
    """ "explore" or "exploit" if the selector draws between the two, else ""."""
    if not EXPLORATION_CHANCES & set(record.why):
        return ""
    return "exploit" if record.exploit else "explore"


def describe_selection(run: RecordedRun, h: RoundRecord) -> str:
    """One sentence: how the clients of a round were selected, and how many could be reached."""
    selector = type(run.recipe.selector).__name__ if run.recipe else "the run's own selector"
    if "phi" in h.why:
        text = _describe_explore_or_exploit(run, h)
    elif "due" in h.why:
        grouping = GROUPING_TEXTS.get(str(h.why.get("by")), "in turn")
        text = (
            f"Round {h.t} selected {len(h.chosen)} clients {grouping}; each client is selected once"
            f" before any is selected again, and {h.why['due']} were still due"
        )
    elif selector == "UniformSelector":
        return f"Round {h.t} selected {_describe_uniform_draw(run, h)}."
    else:
        notes = {key: value for key, value in h.why.items() if key not in NON_SELECTOR_KEYS}
        listed = ", ".join(f"{key} = {value}" for key, value in notes.items())
        text = f"Round {h.t} was selected by {selector}" + (f" ({listed})" if listed else "")
    if "reachable" in h.why:
        text += (
            f"; {h.why['reachable']} of {len(run.roster)} clients could be reached"
            f"{_describe_absent_clients(h)}"
        )
    return f"{text}."


def _describe_explore_or_exploit(run: RecordedRun, h: RoundRecord) -> str:
    chance = f"the probability to explore, phi = {h.why['phi']:.3f}"
    draw = recover_selection_draw(run, h)
    if draw is not None:
        chance = f"the draw {draw:.3f} was {'not ' if h.exploit else ''}below {chance}"
    if h.exploit:
        clients = f"the {len(h.chosen)} reachable clients that agree most with the others"
        return f"Round {h.t} exploited: {chance}, so it selected {clients}"
    return f"Round {h.t} explored: {chance}, so it selected {len(h.chosen)} clients at random"


def _describe_uniform_draw(run: RecordedRun, h: RoundRecord) -> str:
    M, reachable, absent = len(run.roster), h.why.get("reachable"), _describe_absent_clients(h)
    if reachable is None:
        return f"{len(h.chosen)} of {M} clients at random, all equally likely"
    if reachable == len(h.chosen):
        return f"all {reachable} clients that could be reached, of {M}{absent}"
    return (
        f"{len(h.chosen)} clients at random from the {reachable} of {M} that could be"
        f" reached{absent}"
    )


def _describe_absent_clients(h: RoundRecord) -> str:
    reasons = [f"{count} {reason}" for reason, count in count_absence_reasons(h).items()]
    return f" (not asked: {', '.join(reasons)})" if reasons else ""


def count_absence_reasons(h: RoundRecord) -> dict[str, int]:
    """The number of clients that could not be asked in a round, by reason."""
    unreachable = h.why.get("unreachable")
    reasons = dict(unreachable) if isinstance(unreachable, Mapping) else {}
    return {**reasons, BUSY: h.why["busy"]} if h.why.get("busy") else reasons


def describe_round_reach(record: RoundRecord, clients: int) -> str:
    """How many clients could be asked in a round, and why not the others; "" if all could."""
    if "reachable" not in record.why:
        return ""
    return f"{record.why['reachable']} of {clients} reachable{_describe_absent_clients(record)}"


def count_untrained_clients(run: RecordedRun) -> int:
    trained = {client for h in run.rounds for client in h.replied}
    return len(set(run.roster) - trained)


def describe_reach_of_runs(runs: Sequence[RecordedRun]) -> str:
    """How few clients could be reached, and how many never trained; "" if all could be reached."""
    limited = [(run, h) for run in runs for h in run.rounds if "reachable" in h.why]
    if not limited:
        return ""
    run, fewest = min(limited, key=lambda pair: int(pair[1].why["reachable"]))
    never = sorted(map(count_untrained_clients, runs))
    count = f"{never[0]} to {never[-1]}" if never[0] < never[-1] else f"{never[0]}"
    M = len(run.roster)
    return (
        f"at fewest {fewest.why['reachable']} of {M} clients could be reached"
        f"{_describe_absent_clients(fewest)}; {count} of {M} never trained"
    )


def describe_reach(run: RecordedRun) -> str:
    """How few clients could be reached in a round, and how many never trained; "" if all did."""
    M, never = len(run.roster), count_untrained_clients(run)
    limited = [h for h in run.rounds if "reachable" in h.why]
    if not limited:
        return f"{never} of {M} clients never trained." if never else ""
    fewest = min(limited, key=lambda h: h.why["reachable"])
    return (
        f"In {len(limited)} of {len(run.rounds)} rounds some clients could not be reached; in round"
        f" {fewest.t} only {fewest.why['reachable']} of {M} could"
        f"{_describe_absent_clients(fewest)}; "
        + (f"{never} of {M} clients never trained." if never else "every client trained.")
    )
