"""A piece that wraps another: the inner one's state must be part of the outer one's."""

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
