"""Optional methods of pieces that had other names before 0.2: a piece with an old name is an error.

Without the check such a method would be ignored silently, for a piece may leave it out.
"""

from typing import Any

RENAMED_METHODS = {
    "init": "initial_state",
    "objection": "check_recipe",
    "told": "with_deadline",
    "room": "cohort_size",
    "begin": "begin_round",
    "end": "end_round",
    "sends": "list_extra_sizes",
    "term": "loss_term",
}


def explain_renamed_method(piece: Any) -> str:
    """Which method of a user's piece must be renamed, and how; "" if none."""
    kind = piece if isinstance(piece, type) else type(piece)
    if kind.__module__.partition(".")[0] == "flrce":
        return ""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != "flrce"]
    for old, new in RENAMED_METHODS.items():
        if callable(getattr(kind, old, None)) and not any(new in vars(base) for base in own):
            return f"{kind.__name__}.{old} is called {new} since version 0.2; rename it"
    return ""
