"""Named numbers that pieces add to the record of a round: an epsilon, sizes of clusters, rates."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flrce.core.cost_table import COSTS
from flrce.core.pieces import Recipe
from flrce.core.record import FLAT_FIELDS, RoundRecord
from flrce.core.types import ClientRecord, RoundEvent, State
from flrce.errors import BadInput

FIGURE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
MAX_FIGURE = 1e30  # as in the checks of a run directory
RESERVED_NAMES = frozenset(FLAT_FIELDS) | frozenset(COSTS)


def add_figures(
    recipe: Recipe,
    after: State,
    event: RoundEvent,
    record: RoundRecord,
    clients: Sequence[ClientRecord],
) -> tuple[RoundRecord, tuple[ClientRecord, ...]]:
    """The record of a committed round and its clients' lines, with what pieces report of them."""
    record = replace(record, figures=collect_figures(recipe, after, event))
    return record, add_client_figures(recipe, after, event, clients)


def collect_figures(recipe: Recipe, after: State, event: RoundEvent) -> dict[str, float]:
    """Name -> number, of every piece that reports any about a committed round."""
    found: dict[str, float] = {}
    owners: dict[str, Any] = {}
    for role, piece in recipe.iter_pieces():
        reported = piece.report_figures(after.server_state.get(role), event)
        for name, value in _validate_table(piece, "report_figures", reported).items():
            _validate_name(piece, name, owners)
            found[name] = _validate_number(piece, name, value)
    return found


def add_client_figures(
    recipe: Recipe, after: State, event: RoundEvent, clients: Sequence[ClientRecord]
) -> tuple[ClientRecord, ...]:
    """The clients' lines of a round with what pieces report about each."""
    by_client: dict[str, dict[str, float]] = {}
    owners: dict[str, Any] = {}
    known = {client.client for client in clients}
    for role, piece in recipe.iter_pieces():
        reported = piece.report_client_figures(after.server_state.get(role), event)
        for name, values in _validate_table(piece, "report_client_figures", reported).items():
            _validate_name(piece, name, owners)
            for k, value in _validate_table(piece, "report_client_figures", values).items():
                client = after.roster[k] if k in range(len(after.roster)) else None
                if client not in known:
                    raise BadInput(
                        f"{type(piece).__name__}: figure {name!r} is of row {k!r:.20}, which had no"
                        " task in the round; report rows of event.chosen or event.updates.k"
                    )
                table = by_client.setdefault(client, {})
                table[name] = _validate_number(piece, name, value)
    if not by_client:
        return tuple(clients)
    return tuple(replace(line, figures=by_client.get(line.client, {})) for line in clients)


def _validate_table(piece: Any, method: str, reported: Any) -> Mapping[Any, Any]:
    if not isinstance(reported, Mapping):
        raise BadInput(
            f"{type(piece).__name__}.{method} returned a {type(reported).__name__}; return a dict"
            " of numbers by name"
        )
    return reported


def _validate_name(piece: Any, name: Any, owners: dict[str, Any]) -> None:
    """BadInput unless it is a name that nothing else in the record has."""
    owner = type(piece).__name__
    if not isinstance(name, str) or not FIGURE_NAME.fullmatch(name):
        raise BadInput(
            f"{owner}: {name!r:.60} cannot name a figure; use at most 40 letters, digits and _.-"
        )
    if name in RESERVED_NAMES:
        raise BadInput(f"{owner}: figure {name!r} is a field of every record; use another name")
    if name in owners:
        raise BadInput(f"{owner} and {owners[name]} both report a figure {name!r}; rename one")
    owners[name] = owner


def _validate_number(piece: Any, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not abs(number) <= MAX_FIGURE:
        raise BadInput(
            f"{type(piece).__name__}: figure {name!r} is {value!r:.40}; report a finite number, or"
            " leave it out"
        )
    return number
