"""Replies of a round, checked and booked: what the server may use, and every byte and joule of
every client, useful or wasted.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flrce.core.cost_table import MODELLED_FIELD, add_amounts
from flrce.core.engine import Engine, add_carbon, update_batteries
from flrce.core.gate import MAX_SAMPLES_PER_CLIENT, match_replies, validate_replies
from flrce.core.payloads import ReplyContext, is_finite_number, is_plausible_cost
from flrce.core.pending import DueTasks, acknowledge_downloads, collect_due, list_reply_ages
from flrce.core.pieces import Recipe
from flrce.core.planning import describe_round
from flrce.core.record import RoundCosts
from flrce.core.types import (
    ClientCost,
    ClientEvaluation,
    ClientRecord,
    ClientStates,
    PrimaryMetric,
    Reply,
    RoundPlan,
    RoundRecord,
    RoundReplies,
    Task,
    Updates,
)
from flrce.errors import format_one_line

FREE_OF_WASTE = ("useful", "asked", "evaluated")  # outcomes whose costs were not in vain
METRIC_DIGITS = 6  # of a client's figure in the record
LEFT_PREFIX = "left"  # how the reason of a client begins that went while it worked


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
        plan.t, due, replies, rejected, inquiries, plan.keep, add_carbon(engine, plan)
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
    context = ReplyContext(
        engine.get_task_layout,
        len(w),
        engine.trainable,
        plan.keep,
        w,
        samples_before=plan.n,
        bases=due.bases,
        t=plan.t,
        oldest=due.oldest,
        table=came.table,
    )
    return validate_replies(due.tasks, replies, context)


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
    evaluated = [
        (value, n)
        for value, n in zip(record.evaluation.holdouts, record.evaluation.held, strict=True)
        if value is not None
    ]
    if not evaluated:
        return replace(record, evaluation=replace(record.evaluation, holdouts=(), held=()))
    samples = sum(n for _, n in evaluated)
    mean = sum(value * n for value, n in evaluated) / samples
    return replace(record, evaluation=replace(record.evaluation, holdouts=(mean,), held=(samples,)))


def validate_client_metrics(
    replies: Sequence[Reply], engine: Engine, asked: Collection[str]
) -> list[Reply]:
    """The replies; one whose figure of the model cannot be is refused, as anything else that is
    malformed.

    What clients that were not `asked` for one say is left out.
    """
    scale = engine.primary_metric
    return [
        _validate_client_metric(reply, scale, reply.client in asked)
        if isinstance(reply, Reply)
        else reply
        for reply in replies
    ]


def add_client_evaluations(
    record: RoundRecord, replies: Sequence[Reply], engine: Engine
) -> RoundRecord:
    """The record with what those who counted made of w, in the order of `record.replied`."""
    by_client: dict[str, ClientEvaluation] = {}
    for reply in replies:
        if isinstance(reply, Reply) and reply.judged:
            by_client.setdefault(reply.client, reply.judged)  # the first is the one that counted
    evaluations = [by_client.get(client) for client in record.replied]
    if not any(evaluations):
        return record
    scale = engine.primary_metric
    evaluation = replace(
        record.evaluation,
        holdouts=tuple(
            None if evaluation_of is None else float(f"{evaluation_of.value:.{METRIC_DIGITS}g}")
            for evaluation_of in evaluations
        ),
        held=tuple(
            0 if evaluation_of is None else evaluation_of.n for evaluation_of in evaluations
        ),
        metric=scale.metric,
        lower=scale.lower,
    )
    return replace(record, evaluation=evaluation)


def _validate_client_metric(reply: Reply, scale: PrimaryMetric, asked: bool) -> Reply:
    judged: Any = reply.judged
    if judged is not None and not asked:
        return replace(reply, judged=None)
    if judged is None or reply.error:
        return reply
    if not isinstance(judged, ClientEvaluation) or not is_finite_number(
        judged.value, scale.low, scale.high
    ):
        problem = (
            f"{scale.metric} {format_one_line(getattr(judged, 'value', judged), 20)!r} on its"
            " hold-out"
        )
    elif type(judged.n) is not int or not 1 <= judged.n <= MAX_SAMPLES_PER_CLIENT:
        problem = f"a hold-out of {format_one_line(judged.n, 20)} samples"
    else:
        return reply
    return replace(reply, payload=None, judged=None, error=f"malformed: {problem}")


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


def book_costs(
    t: int,
    due: DueTasks,
    replies: Sequence[Reply],
    rejected: Mapping[str, str],
    asked: Sequence[tuple[str, ClientCost]] = (),
    keep: int | None = None,
    price: Callable[[Sequence[ClientRecord]], Sequence[ClientRecord]] = list,
) -> tuple[tuple[ClientRecord, ...], RoundCosts]:
    """Each client's line, and the round's totals.

    A download is charged when it is sent, even to a client that then fails. Late, duplicate and
    unasked replies get lines of their own, all waste: what travelled was paid for. The round lasts
    as long as the slowest reply that counts, or up to the deadline where one was missed, or until
    it is known that a client left whose reply would have counted among the first `keep`. A client
    that is done sooner idles until then, and its line has the idle seconds, so that the lines add
    up to the round. Where `due` has the round's measured seconds, nobody waits. Clients that were
    `asked` for their loss have lines too; that comes before training.
    """
    tasks = due.tasks
    first, strays = match_replies(tasks, replies)
    lines = [
        _make_client_record(
            t,
            first.get(task.client, Reply(task.client, t)),
            rejected.get(task.client, "useful"),
            t - task.t,
        )
        for task in tasks
    ]
    late = any(line.outcome.startswith("late") for line in lines)
    lines += [_make_client_record(t, reply, why) for reply, why in strays]
    seconds = _compute_training_seconds(lines, tasks if late else (), keep)
    if due.seconds is None:
        lines = [replace(line, spent=_add_idle_energy(line.spent, seconds)) for line in lines]
    else:  # clients come and go by themselves, and nobody waits for the round's end
        seconds = due.seconds
    lines += [ClientRecord(t, client, "asked", 0, 0.0, spent) for client, spent in asked]
    lines = list(price(lines))
    spent = [line.spent for line in lines]
    return tuple(lines), RoundCosts(
        **sum_line_costs(lines),
        seconds=seconds + max((s.seconds for _, s in asked), default=0.0),
        measured=bool(spent) and all(s.measured for s in spent),
        other=sum_other_costs(spent),
    )


def _compute_training_seconds(
    lines: Sequence[ClientRecord], late_tasks: Sequence[Task], keep: int | None
) -> float:
    """How long a round waits: for replies that count, for clients that left whose reply would have
    counted, and for deadlines that were missed.
    """
    waits = [line.spent.seconds for line in lines if line.outcome == "useful"]
    if keep is None or len(waits) < keep:
        waits += [line.spent.seconds for line in lines if line.outcome.startswith(LEFT_PREFIX)]
    waits += [task.deadline for task in late_tasks if task.deadline < float("inf")]
    return max(waits, default=0.0)


def sum_line_costs(lines: Sequence[ClientRecord]) -> dict[str, Any]:
    """What clients' lines add up to, by the field of a round's costs."""
    spent = [line.spent for line in lines]
    wasted = [line.spent for line in lines if line.outcome not in FREE_OF_WASTE]
    return {
        "bytes_up": sum(s.bytes_up for s in spent),
        "bytes_down": sum(s.bytes_down for s in spent),
        "bytes_framing": sum(s.framing for s in spent),
        "bytes_wasted": sum(s.bytes_up + s.bytes_down for s in wasted),
        "joules": sum(s.joules for s in spent),
        "joules_wasted": sum(s.joules for s in wasted),
        "joules_low": sum(s.joules / (1 + s.error) for s in spent),
        "joules_high": sum(s.joules * (1 + s.error) for s in spent),
        "grams": sum(s.grams for s in spent),
        "grams_wasted": sum(s.grams for s in wasted),
    }


def bill_evaluation(
    record: RoundRecord,
    evaluated: Sequence[tuple[str, ClientCost]],
    price: Callable[[Sequence[ClientRecord]], Sequence[ClientRecord]] = list,
) -> tuple[RoundRecord, tuple[ClientRecord, ...]]:
    """The record with what clients spent to evaluate the final model after the round, and their
    lines.
    """
    lines = price([ClientRecord(record.t, k, "evaluated", 0, 0.0, s) for k, s in evaluated])
    spent = [line.spent for line in lines]
    before = record.costs
    totals = {name: getattr(before, name) + x for name, x in sum_line_costs(lines).items()}
    other = {name: before.other.get(name, 0.0) + x for name, x in sum_other_costs(spent).items()}
    seconds = before.seconds + max((s.seconds for s in spent), default=0.0)
    costs = replace(before, **totals, seconds=seconds, other={**before.other, **other})
    return replace(record, costs=costs), tuple(lines)


def sum_other_costs(spent: Sequence[ClientCost]) -> dict[str, float]:
    """What clients booked beside bytes, joules and grams, by name."""
    names = dict.fromkeys(name for cost in spent for name in cost.other)
    return {name: sum(cost.other.get(name, 0.0) for cost in spent) for name in names}


def _make_client_record(t: int, reply: Reply, outcome: str, age: int = 0) -> ClientRecord:
    """A client's line; what it claims without sense is booked as nothing."""
    loss = reply.loss if is_finite_number(reply.loss) else 0.0
    spent = reply.spent if is_plausible_cost(reply.spent) else ClientCost()
    n = reply.n if type(reply.n) is int and 0 <= reply.n <= MAX_SAMPLES_PER_CLIENT else 0
    return ClientRecord(t, reply.client, outcome, n, loss, spent, age)


def _add_idle_energy(spent: ClientCost, seconds: float) -> ClientCost:
    """With what the client drew until the round's end."""
    waiting = spent.idle_watts * max(seconds - spent.seconds, 0.0)
    basis = "joules_assumed_waiting" if spent.idle_assumed else MODELLED_FIELD
    other = add_amounts(spent.other, {basis: waiting}) if waiting else spent.other
    return replace(spent, joules=spent.joules + waiting, other=other)
