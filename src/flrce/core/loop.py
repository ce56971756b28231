"""The paper's Algorithm 4 for any recipe and engine.

A generator: whoever iterates logs, saves or quits. A round is plan (planning.py), dispatch and
collect (pending.py), validate and book (checked_replies.py), aggregate and step, evaluate, decide.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce.core import tensor_bytes
from flrce.core.checked_replies import CheckedReplies, bill_evaluation, check_and_book
from flrce.core.engine import Engine, add_carbon, initial_fleet_state
from flrce.core.evaluation import add_diagnostics, add_figures, evaluate_model, find_shadow_stops
from flrce.core.forecast import estimate_inquiries
from flrce.core.memory_limits import check_memory
from flrce.core.pending import collect_replies
from flrce.core.piece_checks import (
    explain_device_mix,
    get_stop_reason,
    refuse_changes_in_place,
    validate_final_model,
    validate_model,
    validate_server_step,
)
from flrce.core.pieces import Recipe
from flrce.core.planning import plan_round
from flrce.core.tensor_bytes import free_unused_buffers
from flrce.core.types import (
    ClientRecord,
    Round,
    RoundEvent,
    RoundPlan,
    RoundRecord,
    RoundReplies,
    State,
    Updates,
)
from flrce.core.unfinished_rounds import close_abandoned_round, close_refused_round
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
    """One round: plan it, train its clients, and close it."""
    plan = plan_round(recipe, engine, state, seed, T)
    replies = RoundReplies()
    if not plan.refused:
        replies = collect_replies(recipe, engine, plan.pending, state, plan.keep)
    with engine.device_lock if engine.updates_on_device else nullcontext():
        return close_round(recipe, engine, plan, replies, T)


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


def close_round(
    recipe: Recipe, engine: Engine, plan: RoundPlan, replies: RoundReplies, T: int | None = None
) -> Round:
    """Check the replies, aggregate, evaluate, decide; or abandon the round and keep the model."""
    inquiries = []  # what asking clients for their loss cost, before the cohort was chosen
    if plan.asked:
        inquiries = estimate_inquiries(engine, plan.asked, {task.client for task in plan.tasks})
    if plan.refused:
        return close_refused_round(recipe, engine, plan, inquiries)
    checked = check_and_book(recipe, engine, plan, replies, inquiries)
    if len(checked.record.replied) < recipe.minimum:
        return close_abandoned_round(recipe, engine, plan, checked)
    with explain_device_mix(checked.updates.sent is not None):
        event, server_state = aggregate_and_step(recipe, engine, plan, checked.updates)
    after = advance_state(plan, checked, event.w_next, server_state)
    model = build_final_model(recipe, after)
    diagnosed = add_diagnostics(checked.record, recipe, plan.state, after, event)
    reported, clients = add_figures(recipe, after, event, diagnosed, checked.clients)
    billed, evaluators = bill_stop_evidence(recipe, engine, plan, reported)
    record = decide_stop(recipe, engine, billed, after, model, T)
    # the chosen first, as they were chosen
    changed_rows = dict.fromkeys(task.k for task in (*plan.tasks, *checked.tasks))
    after = replace(after, history=(*plan.state.history, record))
    return Round(after, record, (*clients, *evaluators), tuple(changed_rows), model)


def aggregate_and_step(
    recipe: Recipe, engine: Engine, plan: RoundPlan, updates: Updates
) -> tuple[RoundEvent, dict[str, Any]]:
    """From the updates to the next model, and what every piece remembers of them."""
    state, server_state = plan.state, dict(plan.state.server_state)
    w = state.w if updates.sent is None else updates.sent
    with refuse_changes_in_place(recipe.aggregator, w, updates.U):
        target = recipe.aggregator(w, updates, server_state.get("aggregator"))  # eq. 4
    validate_model(recipe.aggregator, target, w)
    if "server" in server_state:  # what it remembers is on the host
        w, target = state.w, tensor_bytes.to_host(target)
    with refuse_changes_in_place(recipe.server, w, updates.U):
        stepped = recipe.server.step(w, target, updates, server_state.get("server"))
    w_next, after_step = validate_server_step(recipe.server, stepped, target, w)
    if "server" in server_state:
        server_state["server"] = after_step
    on_host = tensor_bytes.to_host(w_next)
    if on_host is not w_next:
        engine.remember_device_copy(on_host, w_next)
    chosen, M = plan.selection.k, len(state.roster)
    event = RoundEvent(plan.t, state.w, on_host, updates, M, chosen, state.history)
    return event, recipe.observe(server_state, event)


def advance_state(
    plan: RoundPlan, checked: CheckedReplies, w_next: Tensor, server_state: Mapping[str, Any]
) -> State:
    """The state after a round that counts; its record is added once it is complete."""
    return replace(
        plan.state,
        t=plan.t,
        w=w_next,
        server_state={**server_state, **checked.server_state},
        client_states={**plan.state.client_states, **checked.client_states},
        attempt=0,
    )


def build_final_model(recipe: Recipe, state: State) -> Tensor:
    """What the run would return now: the model, or the server's average of models."""
    averaged = recipe.average.model(state.server_state.get("average"), state.w)
    return validate_final_model(recipe.average, averaged, state.w)


def bill_stop_evidence(
    recipe: Recipe, engine: Engine, plan: RoundPlan, record: RoundRecord
) -> tuple[RoundRecord, tuple[ClientRecord, ...]]:
    """The record with the costs of an evaluation that the stop rule reads, and its clients' lines.

    Evaluations that nobody reads but the report are the observer's, and free for every method.
    """
    if not recipe.pays_for_evaluations:
        return record, ()
    return bill_evaluation(record, engine.estimate_evaluation(plan.t), add_carbon(engine, plan))


def decide_stop(
    recipe: Recipe, engine: Engine, record: RoundRecord, after: State, model: Tensor, T: int | None
) -> RoundRecord:
    """The record with the model's evaluation and, where a rule ends the run, its reason.

    `after.history` has the rounds before this one.
    """
    evaluated = evaluate_model(record, engine, after, model)
    shadow = find_shadow_stops(after.history, evaluated, recipe.P)
    complete = replace(evaluated, diagnostics=replace(evaluated.diagnostics, shadow=shadow))
    stop = get_stop_reason(recipe.stop, (*after.history, complete))  # Algorithm 3
    if (stop or complete.t == T) and complete.last_model_metric is None:
        complete = evaluate_model(complete, engine, after, model, last=True)
    return replace(complete, stop=stop)
