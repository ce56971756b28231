"""Replies of a round, checked and booked: what the server may use, and what the round cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flrce.core.costs import book_costs
from flrce.core.engine import Engine
from flrce.core.evaluation import add_client_evaluations, validate_client_metrics
from flrce.core.fleet_state import add_carbon, update_batteries
from flrce.core.gate import match_replies, validate_replies
from flrce.core.pending import DueTasks, acknowledge_downloads, collect_due, list_reply_ages
from flrce.core.pieces import Recipe
from flrce.core.planning import describe_round
from flrce.core.record import RoundCosts
from flrce.core.types import (
    ClientCost,
    ClientRecord,
    ClientStates,
    Reply,
    RoundPlan,
    RoundRecord,
    RoundReplies,
    Task,
    Updates,
)


@dataclass(frozen=True)
class CheckedReplies:
    """What came of the tasks, after the gate: nothing that a client says is used before."""

    updates: Updates
    record: RoundRecord  # costs and outcomes so far
    clients: tuple[ClientRecord, ...]
    tasks: tuple[Task, ...]  # those that the round answers for
    server_state: Mapping[str, Any]  # of pace, downlink and batteries, after the round
    client_states: ClientStates


def check_and_book(
    recipe: Recipe,
    engine: Engine,
    plan: RoundPlan,
    came: RoundReplies,
    inquiries: Sequence[tuple[str, ClientCost]],
) -> CheckedReplies:
    """Replies through the gate, their costs into the record."""
    evaluators = {pending.task.client for pending in plan.pending if pending.task.judge}
    replies = validate_client_metrics(came.replies, engine, evaluators)
    due = collect_due(recipe, plan, came)
    updates, rejected = check_updates(engine, plan, came, replies, due)
    clients, costs = book_costs(
        plan.t,
        due.tasks,
        replies,
        rejected,
        inquiries,
        due.seconds,
        plan.keep,
        add_carbon(engine, plan),
    )
    booked = make_record(plan, updates, rejected, costs)
    record = add_client_evaluations(booked, replies, engine)
    downloads = acknowledge_downloads(recipe, plan.state, plan.pending, came.replies)
    batteries = update_batteries(engine, plan, clients)
    sums_only = recipe.sums and len(updates) > 0
    counted = average_updates(updates) if sums_only else updates
    return CheckedReplies(
        replace(counted, shapes=engine.shapes, sent=came.sent, **describe_round(recipe, plan)),
        average_client_metrics(record) if sums_only else record,
        clients,
        due.tasks,
        {**due.server_state, **downloads, **batteries},
        collect_client_states(due.tasks, replies),
    )


def check_updates(
    engine: Engine, plan: RoundPlan, came: RoundReplies, replies: Sequence[Reply], due: DueTasks
) -> tuple[Updates, dict[str, str]]:
    """The updates that passed the gate, and why each other client did not count."""
    w = plan.state.w if came.sent is None else came.sent  # where the updates are
    return validate_replies(
        due.tasks,
        replies,
        engine.get_task_layout,
        len(w),
        engine.trainable,
        plan.keep,
        w,
        known=plan.n,
        bases=due.bases,
        t=plan.t,
        oldest=due.oldest,
        table=came.table,
    )


def make_record(
    plan: RoundPlan, updates: Updates, rejected: Mapping[str, str], costs: RoundCosts
) -> RoundRecord:
    """Who was chosen, who counted, and what the round cost; not yet evaluated."""
    roster = plan.state.roster
    return RoundRecord(
        t=plan.t,
        exploit=plan.selection.exploit,
        chosen=tuple(task.client for task in plan.tasks),
        replied=tuple(roster[k] for k in updates.k.tolist()),
        rejected=rejected,
        why=plan.selection.why,
        ages=list_reply_ages(roster, updates),
        clients=len(roster),
        began=plan.began,
        costs=costs,
    )


def average_updates(updates: Updates) -> Updates:
    """One row: the mean update by samples and the samples of all; `k` still says who took part."""
    n = updates.n
    total = torch.zeros_like(updates.U[0], dtype=torch.float64)
    for row in range(len(updates.U)):
        total.add_(updates.U[row].double(), alpha=float(n[row]))
    mean = (total / n.sum()).to(updates.U.dtype)
    return Updates(
        updates.k, mean[None], n.sum()[None], updates.trainable, age=updates.age, base=updates.base
    )


def average_client_metrics(record: RoundRecord) -> RoundRecord:
    """The record with one figure of the model: the mean over the hold-outs' samples."""
    known = [
        (value, n)
        for value, n in zip(record.evaluation.holdouts, record.evaluation.held, strict=True)
        if value is not None
    ]
    if not known:
        return replace(record, evaluation=replace(record.evaluation, holdouts=(), held=()))
    samples = sum(n for _, n in known)
    mean = sum(value * n for value, n in known) / samples
    return replace(record, evaluation=replace(record.evaluation, holdouts=(mean,), held=(samples,)))


def collect_client_states(
    tasks: Sequence[Task], replies: Sequence[Reply]
) -> dict[str, Mapping[str, Tensor]]:
    """What each client that answered keeps for its next task; it has moved on even where its reply
    did not count.
    """
    first, _ = match_replies(tasks, replies)
    return {
        client: reply.client_state
        for client, reply in first.items()
        if reply.client_state and _is_tensor_mapping(reply.client_state)
    }


def _is_tensor_mapping(client_state: Any) -> bool:
    return isinstance(client_state, Mapping) and all(
        type(k) is str and type(x) is Tensor for k, x in client_state.items()
    )
