"""Tables over clients grow here, and only here, when a client appears.

A piece declares a table as a field of its state: `field(metadata={"rows": True})`. "fill" says
what a row holds before it is first written (0 unless given); "square" means a table over pairs of
clients.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce.core.linalg import grow_square_table, grow_table
from flrce.core.state_values import list_fields


class RelationshipMap:
    """A selector's state that holds a map of clients, which run directories keep.

    Subclass it with these fields to have the map stored; without H nothing is.
    """

    Omega: Tensor | None  # (M, M); None: a sketch, or too many clients
    H: Tensor | None  # (M,)
    R: Tensor  # (M,)


def grow_tables(server_state: Mapping[str, Any], M: int) -> dict[str, Any]:
    """Every piece's state with room for M clients; what has it already is left as it is."""
    return {role: grow_state_tables(kept, M) for role, kept in server_state.items()}


def grow_state_tables(kept: Any, M: int) -> Any:
    """One state with room for M clients; also the tables of states that it holds."""
    if type(kept) in (list, tuple):
        parts = [grow_state_tables(part, M) for part in kept]
        same = all(new is old for new, old in zip(parts, kept, strict=True))
        return kept if same else type(kept)(parts)
    if type(kept) is dict:
        grown = {key: grow_state_tables(part, M) for key, part in kept.items()}
        return kept if all(grown[key] is part for key, part in kept.items()) else grown
    changes: dict[str, Any] = {}
    for f in list_fields(kept):
        table = getattr(kept, f.name)
        if not isinstance(table, Tensor):
            inner = grow_state_tables(table, M)
            if inner is not table:
                changes[f.name] = inner
            continue
        if not f.metadata.get("rows") or len(table) >= M:
            continue
        square = f.metadata.get("square")
        changes[f.name] = (
            grow_square_table(table, M)
            if square
            else grow_table(table, M, f.metadata.get("fill", 0.0))
        )
    return replace(kept, **changes) if changes else kept
