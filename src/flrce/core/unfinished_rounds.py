"""Rounds that change nothing but the record: one that was not started, one with too few replies."""

from collections.abc import Sequence
from dataclasses import replace

from flrce.core.costs import book_costs
from flrce.core.engine import Engine
from flrce.core.evaluation import evaluate_model, mark_unevaluated
from flrce.core.gate import format_rejections
from flrce.core.pieces import Recipe
from flrce.core.types import ClientCost, ClientRecord, Round, RoundPlan, RoundRecord, State, Task

MAX_ABANDONED_ROUNDS = 3  # abandoned rounds in a row that end a run


def close_refused_round(
    recipe: Recipe, engine: Engine, plan: RoundPlan, inquiries: Sequence[tuple[str, ClientCost]]
) -> Round:
    """A round that a budget does not pay for; what was spent on asking is booked."""
    clients, costs = book_costs(plan.t, (), (), {}, inquiries)
    record = RoundRecord(
        plan.t,
        "not started",
        plan.selection.exploit,
        stop=plan.refused,
        began=plan.began,
        costs=costs,
    )
    return replace(
        _close_unchanged_round(recipe, engine, plan.state, mark_unevaluated(record, engine)),
        clients=clients,
    )


def close_abandoned_round(
    recipe: Recipe,
    engine: Engine,
    state: State,
    record: RoundRecord,
    clients: tuple[ClientRecord, ...],
    tasks: Sequence[Task],
) -> Round:
    """A round with too few replies: batteries and tasks under way go on, the model stays; the third
    in a row stops. `tasks` are those that the round answers for.
    """
    tries = state.attempt + 1
    stop = (
        f"abandoned {tries} times in a row: {format_rejections(record.rejected)}"
        if tries % MAX_ABANDONED_ROUNDS == 0
        else ""
    )
    abandoned = mark_unevaluated(replace(record, outcome="abandoned", stop=stop), engine)
    unchanged = _close_unchanged_round(recipe, engine, state, abandoned)
    return replace(unchanged, clients=clients, changed_rows=tuple(task.k for task in tasks))


def _close_unchanged_round(
    recipe: Recipe, engine: Engine, state: State, record: RoundRecord
) -> Round:
    """A round that changed nothing but the record; where it ends the run, the model so far is
    judged if it was not.
    """
    committed = next((h for h in reversed(state.history) if h.outcome == "committed"), None)
    if record.stop and committed is not None and committed.last_model_metric is None:
        model = recipe.average.model(state.server_state.get("average"), state.w)
        record = evaluate_model(record, engine, state, model, last=True)
    after = replace(
        state,
        history=(*state.history, record),
        attempt=state.attempt + (record.outcome == "abandoned"),
    )
    return Round(after, record, (), (), None)
