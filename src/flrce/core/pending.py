"""Tasks under way: sent in this round or an earlier one, back in this round or a later one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flrce.core.async_state import AsyncState, split_due_tasks
from flrce.core.downlink import EncodedModel
from flrce.core.engine import Engine
from flrce.core.fleet_state import drop_departed_clients, estimate_return_times
from flrce.core.pieces import Recipe
from flrce.core.state_packing import pack_pending_tasks, unpack_pending_tasks, validate_packable
from flrce.core.types import (
    PendingTask,
    RepliesWithTable,
    Reply,
    RoundPlan,
    RoundReplies,
    State,
    Task,
    Updates,
)


@dataclass(frozen=True)
class DueTasks:
    """Which tasks a round answers for, and what is still under way after it."""

    tasks: tuple[Task, ...]
    # client -> the model it was sent, if not this round's
    bases: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: float | None = None  # how long the round lasted; None: as its replies say
    oldest: int | None = None  # replies that are more rounds old do not count
    server_state: Mapping[str, Any] = field(default_factory=dict)  # the pace's, after the round


def list_pending_tasks(recipe: Recipe, state: State) -> list[PendingTask]:
    """What is under way before the round begins."""
    pace_state = state.server_state.get("pace")
    if not isinstance(pace_state, AsyncState):
        return []
    return unpack_pending_tasks(recipe, pace_state)


def dispatch(
    recipe: Recipe,
    engine: Engine,
    state: State,
    tasks: Sequence[Task],
    models: Sequence[EncodedModel],
    pending: Sequence[PendingTask],
    now: float = 0.0,
) -> tuple[PendingTask, ...]:
    """Everything under way once this round's tasks are sent, each with its model."""
    tasks = [replace(task, download=one.download) for task, one in zip(tasks, models, strict=True)]
    back = [0.0] * len(tasks)
    if recipe.pace.buffer_size is not None:
        validate_packable(recipe, tasks)
        back = estimate_return_times(engine, state, tasks, now)
    sent = tuple(
        PendingTask(task, one.model, now, at, one.payload)
        for task, one, at in zip(tasks, models, back, strict=True)
    )
    return (*pending, *sent) if recipe.pace.buffer_size is not None else sent


def collect_replies(
    recipe: Recipe, engine: Engine, pending: Sequence[PendingTask], state: State, keep: int | None
) -> RoundReplies:
    """The replies of a round."""
    buffer = recipe.pace.buffer_size
    size = keep if buffer is None else buffer
    if engine.asynchronous:
        engine.send(pending, state.client_states)
        return engine.collect(pending, size, open_ended=buffer is not None)
    if buffer is not None:
        return RoundReplies(train_in_modelled_order(engine, pending, buffer, state))
    replies = engine.train(pending, state.client_states, keep)
    table, sent = (
        (replies.table, replies.sent) if isinstance(replies, RepliesWithTable) else (None, None)
    )
    return RoundReplies(
        drop_departed_clients(engine, state, pending, replies), table=table, sent=sent
    )


def train_in_modelled_order(
    engine: Engine, pending: Sequence[PendingTask], size: int, state: State
) -> list[Reply]:
    """The replies that the model of their costs has come back first; nobody trains before that."""
    replies: list[Reply] = []
    rest, open_ = list(pending), size
    while rest and open_ > 0:  # clients that went while they worked bring nothing
        back, rest = split_due_tasks(rest, open_)
        for t in sorted({one.task.t for one in back}):
            group = [one for one in back if one.task.t == t]
            come = engine.train(group, state.client_states)
            replies += drop_departed_clients(engine, state, group, come)
        open_ = size - sum(not reply.error for reply in replies)
    return replies


def collect_due(recipe: Recipe, plan: RoundPlan, came: RoundReplies) -> DueTasks:
    """Whose replies the round is about, and what goes on."""
    pending, began = plan.pending, plan.began
    if recipe.pace.buffer_size is None:
        others = {one.task.client: one.w for one in pending if one.w is not plan.state.w}
        return DueTasks(tuple(one.task for one in pending), others)
    answered = {(reply.client, reply.t) for reply in came.replies if isinstance(reply, Reply)}
    back = [one for one in pending if (one.task.client, one.task.t) in answered]
    rest = [one for one in pending if (one.task.client, one.task.t) not in answered]
    clock = max([began, *(one.due for one in back)])
    if came.seconds is not None:  # measured
        clock = began + came.seconds
    pace_state = pack_pending_tasks(recipe, plan.state.server_state["pace"], rest, clock)
    return DueTasks(
        tuple(one.task for one in back),
        {one.task.client: one.w for one in back},
        clock - began,
        recipe.pace.max_age,
        {"pace": pace_state},
    )


def list_reply_ages(roster: Sequence[str], updates: Updates) -> dict[str, int]:
    """Client -> how many rounds old its reply is, for those that are not of this round."""
    if updates.age is None:
        return {}
    return {
        roster[k]: age
        for k, age in zip(updates.k.tolist(), updates.age.tolist(), strict=True)
        if age
    }
