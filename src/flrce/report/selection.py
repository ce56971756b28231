"""How a round's clients were picked, in one sentence."""

from flrce.core.types import RoundRecord
from flrce.report.scores import recover_selection_draw
from flrce.storage.read import RecordedRun

GROUPING_TEXTS = {  # how those who are due are grouped (methods/selection/turns.py)
    "balance": "grouped by their last updates",
    "agreement": "that agree most with the others",
    "sizes": "of all sizes",
    "chance": "at random",
}
NON_SELECTOR_KEYS = ("reachable", "busy")  # figures of a round that no selector wrote


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
        return f"all {reachable} clients that could be reached, of {M}{_describe_busy_clients(h)}"
    return (
        f"{len(h.chosen)} of the {reachable} clients that could be reached, at random; there are"
        f" {M}{_describe_busy_clients(h)}"
    )


def _describe_reachable_clients(run: RecordedRun, h: RoundRecord) -> str:
    reachable = h.why.get("reachable")
    return (
        ""
        if reachable is None
        else (
            f"; {reachable} of {len(run.roster)} clients could be"
            f" reached{_describe_busy_clients(h)}"
        )
    )


def _describe_busy_clients(h: RoundRecord) -> str:
    return (
        f", and {h.why['busy']} more were still at work on earlier tasks"
        if h.why.get("busy")
        else ""
    )


def describe_reach(run: RecordedRun) -> str:
    """How few clients could be reached, and how many never trained; "" where all could be reached
    in every round.
    """
    counts = [h.why["reachable"] for h in run.rounds if "reachable" in h.why]
    if not counts:
        return ""
    trained = {client for h in run.rounds for client in h.replied}
    never = len(run.roster) - len(trained & set(run.roster))
    least = f"{min(counts)} of {len(run.roster)} at the fewest"
    return (
        f"In {len(counts)} of {len(run.rounds)} rounds not every client could be asked ({least});"
        f" {never} of {len(run.roster)} clients never trained."
    )
