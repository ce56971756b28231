"""The paper's Algorithm 4 for any recipe and engine.

A generator: whoever iterates logs, saves or quits. A round is plan (planning.py), dispatch and
collect (pending.py), validate (gate.py), book (costs.py), aggregate and step, evaluate, decide.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flrce.core import device_transfer
from flrce.core.buffers import free_unused_buffers
from flrce.core.costs import book_costs
from flrce.core.diagnostics import add_diagnostics
from flrce.core.downloads import acknowledge_downloads
from flrce.core.engine import Engine
from flrce.core.evaluation import add_client_evaluations, evaluate_model, validate_client_metrics
from flrce.core.figures import add_figures
from flrce.core.fleet_state import add_carbon, initial_fleet_state, update_batteries
from flrce.core.forecast import estimate_inquiries
from flrce.core.gate import collect_client_states, validate_replies
from flrce.core.memory_limits import check_memory
from flrce.core.pending import DueTasks, collect_due, collect_replies, list_reply_ages
from flrce.core.pieces import Recipe
from flrce.core.planning import describe_round, plan_round
from flrce.core.shadow_stops import find_shadow_stops
from flrce.core.summed_updates import average_client_metrics, average_updates
from flrce.core.types import (
    ClientCost,
    ClientRecord,
    ClientStates,
    Round,
    RoundEvent,
    RoundPlan,
    RoundRecord,
    RoundReplies,
    State,
    Updates,
)
from flrce.core.unfinished_rounds import close_abandoned_round, close_refused_round
from flrce.core.validation import (
    explain_device_mix,
    get_stop_reason,
    move_to_host,
    validate_final_model,
    validate_model,
    validate_server_step,
)
from flrce.errors import BadInput

__all__ = ["close_round", "is_stopped", "make_initial_state", "plan_round", "rounds", "run_round"]
RoundFunction = Callable[[Recipe, Engine, State, int, int], Round]  # as `run_round`


def rounds(
    recipe: Recipe,
    engine: Engine,
    state: State,
    T: int,
    seed: int,
    turn: RoundFunction | None = None,
) -> Iterator[Round]:
    """Algorithm 4: yields after every round (`turn`), until T, a stop, or too many
    abandoned rounds in a row.
    """
    try:
        while state.t < T and not is_stopped(state):
            done = (turn or run_round)(recipe, engine, state, T, seed)
            yield done
            if done.record.stop:
                return
            state = done.state
            del done  # and with it the final model: it may be large
    finally:
        free_unused_buffers()


def run_round(recipe: Recipe, engine: Engine, state: State, T: int, seed: int) -> Round:
    """One round."""
    plan = plan_round(recipe, engine, state, seed, T)
    came = (
        RoundReplies()
        if plan.refused
        else collect_replies(recipe, engine, plan.flights, state, plan.keep)
    )
    with engine.device_lock if engine.updates_on_device else nullcontext():
        return close_round(recipe, engine, plan, came, T)


def is_stopped(state: State) -> bool:
    """Whether the run was stopped; one that only ran out of clients may be resumed."""
    return (
        bool(state.history)
        and bool(state.history[-1].stop)
        and state.history[-1].outcome != "abandoned"
    )


def make_initial_state(recipe: Recipe, engine: Engine, w: Tensor) -> State:
    """Before the first round."""
    if not isinstance(engine, Engine):
        raise BadInput(f"class {type(engine).__name__} must subclass flrce.Engine")
    clients = tuple(engine.clients(0))
    recipe.check_fleet(len(clients), engine.trainable, len(w))
    check_memory(
        recipe,
        len(clients),
        engine.trainable,
        len(w),
        engine.updates_on_device,
        engine.worker_processes,
    )
    return State(
        0,
        w,
        {
            **recipe.initial_state(len(clients), engine.trainable, len(w)),
            **initial_fleet_state(engine),
        },
        clients,
    )


@dataclass(frozen=True)
class CheckedReplies:
    """What came of the tasks, after the gate: nothing that a client says is used before."""

    updates: Updates
    record: RoundRecord  # costs and outcomes so far
    clients: tuple[ClientRecord, ...]
    landing: DueTasks
    states: ClientStates


def close_round(
    recipe: Recipe, engine: Engine, plan: RoundPlan, came: RoundReplies, T: int | None = None
) -> Round:
    """Check the replies, aggregate, evaluate, decide; or abandon the round and keep the model."""
    state = plan.state
    asked = estimate_inquiries(engine, plan.asked, {task.client for task in plan.tasks})
    if plan.refused:
        return close_refused_round(recipe, engine, plan, asked)
    checked = check_and_book(recipe, engine, plan, came, asked)
    landing, record = checked.landing, checked.record
    if len(record.replied) < recipe.minimum:
        return close_abandoned_round(recipe, engine, state, landing, record, checked.clients)
    with explain_device_mix(checked.updates.sent is not None):
        event, memory = aggregate_and_step(recipe, engine, plan, checked.updates)
    memory = {**memory, **landing.memory}
    averaged = recipe.average.model(memory.get("average"), event.w_next)
    model = validate_final_model(recipe.average, averaged, event.w_next)
    after = State(plan.t, event.w_next, memory, state.roster, {**state.carry, **checked.states})
    record = add_diagnostics(record, recipe, state, after, event)
    record, clients = add_figures(recipe, after, event, record, checked.clients)
    record = decide_stop(recipe, engine, record, state, after, model, T)
    # the chosen first, as they were chosen
    touched = dict.fromkeys(task.k for task in (*plan.tasks, *landing.tasks))
    after = replace(after, history=(*state.history, record))
    return Round(after, record, clients, tuple(touched), model)


def check_and_book(
    recipe: Recipe,
    engine: Engine,
    plan: RoundPlan,
    came: RoundReplies,
    asked: Sequence[tuple[str, ClientCost]],
) -> CheckedReplies:
    """Replies through the gate, their costs into the record."""
    state, t = plan.state, plan.t
    evaluators = {flight.task.client for flight in plan.flights if flight.task.judge}
    replies = validate_client_metrics(came.replies, engine, evaluators)
    landing = collect_due(recipe, plan, came)
    w = state.w if came.sent is None else came.sent  # where the updates are
    updates, rejected = validate_replies(
        landing.tasks,
        replies,
        engine.get_task_layout,
        len(w),
        engine.trainable,
        plan.keep,
        w,
        known=plan.n,
        bases=landing.bases,
        t=t,
        oldest=landing.oldest,
        table=came.table,
    )
    price = add_carbon(engine, plan)
    clients, costs = book_costs(
        t, landing.tasks, replies, rejected, asked, landing.seconds, plan.keep, price
    )
    received = acknowledge_downloads(recipe, state, plan.flights, came.replies)
    batteries = update_batteries(engine, plan, clients)
    landing = replace(landing, memory={**landing.memory, **received, **batteries})
    record = RoundRecord(
        t=t,
        exploit=plan.chosen.exploit,
        chosen=tuple(task.client for task in plan.tasks),
        replied=tuple(state.roster[k] for k in updates.k.tolist()),
        rejected=rejected,
        why=plan.chosen.why,
        ages=list_reply_ages(state.roster, updates),
        clients=len(state.roster),
        began=plan.began,
        **costs,
    )
    record = add_client_evaluations(record, replies, engine)
    if recipe.sums and len(updates):
        updates, record = average_updates(updates), average_client_metrics(record)
    updates = replace(updates, shapes=engine.shapes, sent=came.sent, **describe_round(recipe, plan))
    states = collect_client_states(landing.tasks, replies)
    return CheckedReplies(updates, record, clients, landing, states)


def decide_stop(
    recipe: Recipe,
    engine: Engine,
    record: RoundRecord,
    state: State,
    after: State,
    model: Tensor,
    T: int | None,
) -> RoundRecord:
    """The record with the model's evaluation and, where a rule ends the run, its reason."""
    record = evaluate_model(record, engine, after, model)
    record = replace(record, shadow=find_shadow_stops(state.history, record, recipe.P))
    stop = get_stop_reason(recipe.stop, (*state.history, record))  # Algorithm 3
    if (stop or record.t == T) and record.last_model_metric is None:
        record = evaluate_model(record, engine, after, model, last=True)
    return replace(record, stop=stop)


def aggregate_and_step(
    recipe: Recipe, engine: Engine, plan: RoundPlan, updates: Updates
) -> tuple[RoundEvent, dict[str, Any]]:
    """From the updates to the next model, and what every piece remembers of them."""
    state = plan.state
    w = state.w if updates.sent is None else updates.sent
    target = recipe.aggregator(w, updates, state.memory.get("aggregator"))  # eq. 4
    validate_model(recipe.aggregator, target, w)
    if "server" in state.memory:  # what it remembers is on the host
        w, target = state.w, device_transfer.to_host(target)
    found = recipe.server.step(w, target, updates, state.memory.get("server"))
    w_next, server = validate_server_step(recipe.server, found, target, w)
    event = RoundEvent(
        plan.t,
        state.w,
        move_to_host(engine, w_next),
        updates,
        len(state.roster),
        plan.chosen.k,
        state.history,
    )
    before = {**state.memory, "server": server} if "server" in state.memory else state.memory
    return event, recipe.observe(before, event)
