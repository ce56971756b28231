"""What a user's piece may get wrong that its base class cannot see: links that would be lost,
methods with their old names, and an inner piece whose state would be forgotten.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from flrce.core.roles import Piece


def list_inner_pieces(piece: Any) -> Iterator[Piece]:
    """The pieces that are fields of a piece, alone or in a tuple or list."""
    for f in fields(piece) if is_dataclass(piece) else ():
        value = getattr(piece, f.name, None)
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Piece):
                yield part


def explain_forgotten_state(piece: Any) -> str:
    """Why a wrapper would lose what its inner piece remembers; "" if it would not."""
    name = type(piece).__name__
    for inner in list_inner_pieces(piece):
        if inner.has_state and not piece.has_state:
            return (
                f"{name} wraps {type(inner).__name__}, which remembers rounds, and {name} has no"
                " state; define initial_state and observe that hold the inner piece's, or use it"
                " alone"
            )
    return ""


def has_links(piece: Any) -> bool:
    """Whether a piece, or one that it is made of, has links for clients' updates."""
    links = getattr(piece, "links", ())  # a name that only trainers declare
    if isinstance(links, list | tuple) and any(_is_link(link) for link in links):
        return True
    inner = [getattr(piece, f.name, None) for f in fields(piece)] if is_dataclass(piece) else []
    parts = [
        part for value in inner for part in (value if isinstance(value, list | tuple) else (value,))
    ]
    return any(has_links(part) for part in parts if is_dataclass(part))


def _is_link(link: Any) -> bool:
    return any(callable(getattr(link, method, None)) for method in ("step", "probe", "loss_term"))


# optional methods that had other names before 0.2; ignored without this check, as a piece may leave
# them out
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
