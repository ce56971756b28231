"""Rounds that change nothing but the record: one that was not started, one with too few replies."""

from collections.abc import Sequence
from dataclasses import replace

from flrce.core.checked_replies import CheckedReplies, book_costs
from flrce.core.engine import Engine
from flrce.core.evaluation import evaluate_model, mark_unevaluated
from flrce.core.gate import format_rejections
from flrce.core.pending import DueTasks
from flrce.core.pieces import Recipe
from flrce.core.types import ClientCost, Round, RoundPlan, RoundRecord, State

MAX_ABANDONED_ROUNDS = 3  # abandoned rounds in a row that end a run


def close_refused_round(
    recipe: Recipe, engine: Engine, plan: RoundPlan, inquiries: Sequence[tuple[str, ClientCost]]
) -> Round:
    """A round that a budget does not pay for; what was spent on asking is booked."""
    clients, costs = book_costs(plan.t, DueTasks(()), (), {}, inquiries)
    exploit, began = plan.selection.exploit, plan.began
    record = RoundRecord(
        plan.t, "not started", exploit, stop=plan.refused, began=began, costs=costs
    )
    return Round(*_record_unchanged_round(recipe, engine, plan.state, record), clients)


def close_abandoned_round(
    recipe: Recipe, engine: Engine, plan: RoundPlan, checked: CheckedReplies
) -> Round:
    """A round with too few replies: batteries and tasks under way go on, the model stays; the third
    in a row stops.
    """
    server_state = {**plan.state.server_state, **checked.server_state}
    tries = plan.state.attempt + 1
    state = replace(plan.state, server_state=server_state, attempt=tries)
    record = replace(checked.record, outcome="abandoned")
    if tries % MAX_ABANDONED_ROUNDS == 0:
        why = format_rejections(record.rejected)
        record = replace(record, stop=f"abandoned {tries} times in a row: {why}")
    rows = tuple(task.k for task in checked.tasks)
    return Round(*_record_unchanged_round(recipe, engine, state, record), checked.clients, rows)


def _record_unchanged_round(
    recipe: Recipe, engine: Engine, state: State, record: RoundRecord
) -> tuple[State, RoundRecord]:
    """The state after a round that changed nothing but the record; where it ends the run, the model
    so far is judged if it was not.
    """
    record = mark_unevaluated(record, engine)
    committed = next((h for h in reversed(state.history) if h.outcome == "committed"), None)
    if record.stop and committed is not None and committed.last_model_metric is None:
        model = recipe.average.model(state.server_state.get("average"), state.w)
        record = evaluate_model(record, engine, state, model, last=True)
    return replace(state, history=(*state.history, record)), record
