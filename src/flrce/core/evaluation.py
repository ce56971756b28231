"""What the record says of a committed round beside its costs: how good the models are, what the
updates show (conflict, consensus, headway, clients that are out of line), and figures of pieces.

Nothing here changes the run; stop rules and reports read it from the record.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce.core.cost_table import COSTS
from flrce.core.engine import Engine
from flrce.core.linalg import gram_matrix, mean_conflicts, update_consensus
from flrce.core.pieces import Recipe
from flrce.core.record import FLAT_FIELDS, RoundRecord
from flrce.core.types import ClientRecord, Evaluation, RoundEvent, State
from flrce.errors import BadInput


def evaluate_model(
    record: RoundRecord, engine: Engine, state: State, model: Tensor, last: bool = False
) -> RoundRecord:
    """The record with the judgement of w and, where it differs, of the server average; `last`: due
    or not.

    Where judging a model costs messages, one is judged: the final model.
    """
    once = engine.judges_once
    seen = engine.evaluate(model if once else state.w, record.t, last, state.client_states)
    if seen is None:
        return mark_unevaluated(record, engine)
    averaged = (
        None
        if once or model is state.w
        else engine.evaluate(model, record.t, last, state.client_states)
    )
    return add_evaluation(record, seen, averaged)


def add_evaluation(
    record: RoundRecord, seen: Evaluation, averaged: Evaluation | None
) -> RoundRecord:
    """The record with what was seen of the last model, and of the server average where there is
    one.

    What is not a number is left out: the ledger holds nothing that cannot be read back.
    """
    plain = seen.metric == "accuracy"
    evaluation = replace(
        record.evaluation,
        accuracy=_finite_or_none(seen.value) if plain else None,
        accuracy_weighted=_finite_or_none(seen.weighted) if plain else None,
        loss=_finite_or_none(seen.loss),
        averaged=_finite_or_none(averaged.value) if averaged else None,
        metric=seen.metric,
        lower=seen.lower,
        metrics=_select_metrics(seen.metrics, plain),
        pooled=_select_metrics(seen.pooled, plain),
        metrics_averaged=_select_metrics(averaged.metrics, plain) if averaged else {},
    )
    costs = replace(record.costs, bytes_evaluation=seen.nbytes)
    return replace(record, evaluation=evaluation, costs=costs)


def mark_unevaluated(record: RoundRecord, engine: Engine) -> RoundRecord:
    """The record of a round whose model is not judged: what it would have been judged by is known
    all the same.
    """
    scale = engine.primary_metric
    evaluation = replace(record.evaluation, metric=scale.metric, lower=scale.lower)
    return replace(record, evaluation=evaluation)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _select_metrics(metrics: Mapping[str, float], plain: bool) -> dict[str, float]:
    """Nothing where accuracy is all there is: it has fields of its own."""
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {} if plain and set(finite) <= {"accuracy"} else finite


def add_diagnostics(
    record: RoundRecord, recipe: Recipe, state: State, after: State, event: RoundEvent
) -> RoundRecord:
    """The record with the round's diagnostics; `state` is that before the round. Of sums: what
    models alone tell.
    """
    if recipe.sums:
        return record
    server_state, updates = after.server_state, event.updates
    G = gram_matrix(updates.u)
    odd = flag_updates(G, record.replied)
    left = recipe.aggregator.downweights(server_state.get("aggregator"))
    diagnostics = replace(
        record.diagnostics,
        conflicts=mean_conflicts(G),
        consensus=update_consensus(G, updates.n),
        headway=recipe.average.get_headway(server_state.get("average")),
        flagged=odd,
        doubted={
            client: share for client, share in zip(record.replied, left, strict=False) if share < 1
        },
        votes=count_trusted_conflicts(G, record.replied, find_muted_clients(state.history, odd)),
    )
    return replace(record, diagnostics=diagnostics)


MAX_NORM_RATIO = 5.0  # times the median norm
MIN_OPPOSED_SHARE = 0.5  # share of peers that an update points against, and
MIN_SHARE_EXCESS = 0.25  # how far that share lies above the round's median
STRIKES, WINDOW = 2, 20  # flags in the last rounds that silence a client even where it behaves


def flag_updates(G: Tensor, clients: Sequence[str]) -> dict[str, str]:
    """Client -> what is odd about its update, for those where something is; G (P, P) are the
    updates' products.
    """
    norms = G.diagonal().clamp(min=0).sqrt()
    moved = norms > 0
    flags = {
        client: "zero update"
        for client, moves in zip(clients, moved.tolist(), strict=True)
        if not moves
    }
    if int(moved.sum()) < 4:  # three clients have no majority worth the name
        return flags
    usual = norms[moved].median()
    share = ((G < 0).sum(1) / (moved.sum() - 1)).where(moved, 0.0)
    middle = share[moved].median()
    far, against = (
        norms > MAX_NORM_RATIO * usual,
        (share > MIN_OPPOSED_SHARE) & (share - middle > MIN_SHARE_EXCESS),
    )
    for i in (far | against).nonzero()[:, 0].tolist():
        if far[i]:
            flags[clients[i]] = f"norm {float(norms[i] / usual):.3g} times the median"
        else:
            flags[clients[i]] = (
                f"against {float(share[i]):.0%} of its peers, median {float(middle):.0%}"
            )
    return flags


def find_muted_clients(history: Sequence[RoundRecord], now: Mapping[str, str]) -> set[str]:
    """Clients without a vote: flagged in this round, or often enough lately."""
    strikes: dict[str, int] = {}
    for record in history[-WINDOW:]:
        for client in record.diagnostics.flagged:
            strikes[client] = strikes.get(client, 0) + 1
    return {*now, *(client for client, count in strikes.items() if count >= STRIKES)}


def count_trusted_conflicts(G: Tensor, clients: Sequence[str], mute: set[str]) -> float:
    """Conflicting peers per client (Algorithm 3) among those with a vote, scaled to the whole
    round's size.

    0 where fewer than half of the clients have one: then nobody is left to trust.
    """
    heard = [i for i, client in enumerate(clients) if client not in mute]
    if len(heard) < 2 or 2 * len(heard) < len(clients):
        return 0.0
    return mean_conflicts(G[heard][:, heard]) * (len(clients) - 1) / (len(heard) - 1)


SHADOW_THRESHOLDS = (4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0)  # the paper's grid, for P = 10


def find_shadow_stops(
    history: Sequence[RoundRecord], record: RoundRecord, P: int
) -> tuple[float, ...]:
    """Every threshold of the paper's grid (scaled to P) whose plain rule would have stopped the run
    by this round.

    The last committed record of the `history` before it has those that would have before, so that
    no other is read.
    """
    before = next((h.diagnostics.shadow for h in reversed(history) if h.outcome == "committed"), ())
    now = tuple(
        psi * P / 10
        for psi in SHADOW_THRESHOLDS
        if record.exploit and record.diagnostics.conflicts >= psi * P / 10
    )
    return max(before, now, key=len)  # both begin at the grid's least


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
    figures: dict[str, float] = {}
    owners: dict[str, Any] = {}
    for role, piece in recipe.iter_pieces():
        reported = piece.report_figures(after.server_state.get(role), event)
        for name, value in _validate_table(piece, "report_figures", reported).items():
            _validate_name(piece, name, owners)
            figures[name] = _validate_number(piece, name, value)
    return figures


def add_client_figures(
    recipe: Recipe, after: State, event: RoundEvent, clients: Sequence[ClientRecord]
) -> tuple[ClientRecord, ...]:
    """The clients' lines of a round with what pieces report about each."""
    by_client: dict[str, dict[str, float]] = {}
    owners: dict[str, Any] = {}
    names = {client.client for client in clients}
    for role, piece in recipe.iter_pieces():
        reported = piece.report_client_figures(after.server_state.get(role), event)
        for name, values in _validate_table(piece, "report_client_figures", reported).items():
            _validate_name(piece, name, owners)
            for k, value in _validate_table(piece, "report_client_figures", values).items():
                client = after.roster[k] if k in range(len(after.roster)) else None
                if client not in names:
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
