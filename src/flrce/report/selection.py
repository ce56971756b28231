"""How a round's clients were picked, in one sentence."""

from collections.abc import Mapping

from flrce.core.types import RoundRecord
from flrce.report.scores import recover_selection_draw
from flrce.storage.read import RecordedRun

GROUPING_TEXTS = {  # how those who are due are grouped (methods/selection/turns.py)
    "balance": "grouped by their last updates",
    "agreement": "that agree most with the others",
    "sizes": "of all sizes",
    "chance": "at random",
}
#: names of the probability to explore in a selector's notes: the paper's phi, Oort's epsilon
EXPLORATION_CHANCES = frozenset({"phi", "epsilon"})
NON_SELECTOR_KEYS = ("reachable", "busy", "unreachable")  # figures that no selector wrote
BUSY = "still at work on an earlier task"


def get_phase(record: RoundRecord) -> str:
    """ "explore" or "exploit" where the selector draws between the two; otherwise ""."""
    if not EXPLORATION_CHANCES & set(record.why):
        return ""
    return "exploit" if record.exploit else "explore"


def describe_selection(run: RecordedRun, h: RoundRecord) -> str:
    """One sentence on how the round's clients were picked, and among how many where not all could
    be reached.
    """
    phi, drawn = h.why.get("phi"), recover_selection_draw(run, h)
    if phi is not None:
        sign = "not below" if h.exploit else "below"
        chance = f"the chance to explore, phi = {phi:.3f}"
        against = chance if drawn is None else f"the draw {drawn:.3f} was {sign} {chance}"
        best = f"the {len(h.chosen)} reachable clients that agree most with the others"
        then = best if h.exploit else f"{len(h.chosen)} at random"
        how = (
            f"Round {h.t} {'exploited' if h.exploit else 'explored'}: {against}, so it took {then}"
        )
    elif "due" in h.why:
        them = GROUPING_TEXTS.get(str(h.why.get("by")), "in turn")
        how = (
            f"Round {h.t} took {len(h.chosen)} clients {them}; everybody has a turn before anybody"
            f" has the next, and {h.why['due']} were still waiting for theirs"
        )
    elif run.recipe is not None and type(run.recipe.selector).__name__ == "UniformSelector":
        return f"Round {h.t} took {_describe_uniform_draw(run, h)}."
    else:
        selector = type(run.recipe.selector).__name__ if run.recipe else "the run's own selector"
        told = ", ".join(
            f"{key} = {value}" for key, value in h.why.items() if key not in NON_SELECTOR_KEYS
        )
        how = f"Round {h.t} was chosen by {selector}" + (f" ({told})" if told else "")
    return f"{how}{_describe_reachable_clients(run, h)}."


def _describe_uniform_draw(run: RecordedRun, h: RoundRecord) -> str:
    """Whom a uniform draw took, of how many that it could take."""
    M, reachable = len(run.roster), h.why.get("reachable")
    if reachable is None:
        return f"{len(h.chosen)} of {M} clients at random, all equally likely"
    if reachable == len(h.chosen):
        return f"all {reachable} clients that could be reached, of {M}{_describe_absent_clients(h)}"
    return (
        f"{len(h.chosen)} of the {reachable} clients that could be reached, at random; there are"
        f" {M}{_describe_absent_clients(h)}"
    )


def _describe_reachable_clients(run: RecordedRun, h: RoundRecord) -> str:
    reachable = h.why.get("reachable")
    return (
        ""
        if reachable is None
        else (
            f"; {reachable} of {len(run.roster)} clients could be"
            f" reached{_describe_absent_clients(h)}"
        )
    )


def _describe_absent_clients(h: RoundRecord) -> str:
    """Why the others could not be asked."""
    reasons = [f"{count} {reason}" for reason, count in count_absence_reasons(h).items()]
    return f" (not asked: {', '.join(reasons)})" if reasons else ""


def count_absence_reasons(h: RoundRecord) -> dict[str, int]:
    """How many clients could not be asked in a round, by reason."""
    found = h.why.get("unreachable")
    reasons = dict(found) if isinstance(found, Mapping) else {}
    return {**reasons, BUSY: h.why["busy"]} if h.why.get("busy") else reasons


def describe_round_reach(record: RoundRecord, clients: int) -> str:
    """How many clients could be asked in a round, and why the others could not; "" where all
    could be.
    """
    if "reachable" not in record.why:
        return ""
    return f"{record.why['reachable']} of {clients} reachable{_describe_absent_clients(record)}"


def describe_reach(run: RecordedRun) -> str:
    """How few clients could be reached, why, and how many never trained; "" where all could be
    reached in every round and all trained.
    """
    trained = {client for h in run.rounds for client in h.replied}
    M = len(run.roster)
    never = M - len(trained & set(run.roster))
    idle = f"{never} of {M} clients never trained" if never else ""
    limited = [h for h in run.rounds if "reachable" in h.why]
    if not limited:
        return f"{idle}." if idle else ""
    least = min(limited, key=lambda h: h.why["reachable"])
    found = (
        f"In {len(limited)} of {len(run.rounds)} rounds not every client could be asked; the"
        f" fewest, in round {least.t}, were {least.why['reachable']} of"
        f" {M}{_describe_absent_clients(least)}"
    )
    return f"{found}; {idle or 'every client has trained'}."
