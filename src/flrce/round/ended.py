"""Rounds that change nothing but the record: one that was not started, one with too few replies."""

from collections.abc import Sequence
from dataclasses import replace

from flrce.engine import Engine
from flrce.pieces import Recipe
from flrce.round.booking import book
from flrce.round.flights import Landing
from flrce.round.gate import reasons
from flrce.round.judgement import judge, unjudged
from flrce.types import ClientRecord, Plan, Record, Round, Spent, State

GIVE_UP = 3  # abandoned rounds in a row that end a run


def not_started(recipe: Recipe, engine: Engine, plan: Plan, asked: Sequence[tuple[str, Spent]]) -> Round:
    """A round that a budget does not pay for; what was spent on asking is booked."""
    clients, costs = book(plan.t, (), (), {}, asked)
    record = Record(plan.t, "not started", plan.chosen.exploit, stop=plan.refused, began=plan.began, **costs)
    return replace(_ended(recipe, engine, plan.state, unjudged(record, engine)), clients=clients)


def abandoned(
    recipe: Recipe, engine: Engine, state: State, landing: Landing, record: Record, clients: tuple[ClientRecord, ...]
) -> Round:
    """A round with too few replies: batteries and tasks under way go on, the model stays; the third in a row stops."""
    tries = state.attempt + 1
    stop = f"abandoned {tries} times in a row: {reasons(record.rejected)}" if tries % GIVE_UP == 0 else ""
    record = unjudged(replace(record, outcome="abandoned", stop=stop), engine)
    ended = _ended(recipe, engine, replace(state, memory={**state.memory, **landing.memory}), record)
    return replace(ended, clients=clients, touched=tuple(task.k for task in landing.tasks))  # batteries


def _ended(recipe: Recipe, engine: Engine, state: State, record: Record) -> Round:
    """A round that changed nothing but the record; where it ends the run, the model so far is judged if it was not."""
    committed = next((h for h in reversed(state.history) if h.outcome == "committed"), None)
    if record.stop and committed is not None and committed.headline is None:
        model = recipe.average.model(state.memory.get("average"), state.w)
        record = judge(record, engine, state, model, last=True)
    after = replace(state, history=(*state.history, record), attempt=state.attempt + (record.outcome == "abandoned"))
    return Round(after, record, (), (), None)
