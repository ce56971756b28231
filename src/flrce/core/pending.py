"""Models and tasks on their way: encoded and sent in this round or an earlier one, back in this
round or a later one.

A client that replied has decoded its model, whether or not its reply counts. Of a client without a
reply nothing is known: the next difference refers to the model that it acknowledged last, which
clients keep beside the newest one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flrce.core.async_state import (
    AsyncState,
    pack_pending_tasks,
    split_due_tasks,
    unpack_pending_tasks,
    validate_packable,
)
from flrce.core.downlink import DownloadRequest, EncodedModel
from flrce.core.engine import Engine
from flrce.core.fleet_state import drop_departed_clients, estimate_return_times
from flrce.core.gate import match_replies
from flrce.core.pieces import Recipe
from flrce.core.types import (
    PendingTask,
    Portion,
    RepliesWithTable,
    Reply,
    RoundPlan,
    RoundReplies,
    State,
    Task,
    Updates,
)
from flrce.errors import BadInput


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


MEMORY_KEY = "downlink"  # in State.server_state


def encode_downloads(
    recipe: Recipe, engine: Engine, state: State, tasks: Sequence[Task]
) -> tuple[State, list[EncodedModel]]:
    """The model of each task as its client decodes it, and the state once they are sent."""
    dense = [EncodedModel(state.w, None) for _ in tasks]
    if recipe.downlink.is_dense or not tasks:
        return state, dense
    coded = [i for i, task in enumerate(tasks) if task.download is not None]
    requests = [DownloadRequest(tasks[i], engine.get_held_part(tasks[i])) for i in coded]
    piece_state = state.server_state.get(MEMORY_KEY)
    models, piece_state = recipe.downlink.encode_models(piece_state, state.w, requests)
    if len(models) != len(coded):
        raise BadInput(
            f"{type(recipe.downlink).__name__}.encode_models gave {len(models)} downloads for"
            f" {len(coded)} requests; give each"
        )
    for i, model in zip(coded, models, strict=True):
        dense[i] = model
    if MEMORY_KEY in state.server_state:
        state = replace(state, server_state={**state.server_state, MEMORY_KEY: piece_state})
    return state, dense


def count_download_kinds(recipe: Recipe, models: Sequence[EncodedModel]) -> dict[str, Any]:
    """For the ledger: how many downloads of each kind a round has; nothing where all are dense."""
    if recipe.downlink.is_dense or not models:
        return {}
    kinds = Counter("full" if model.download is None else model.download.kind for model in models)
    return {"downloads": dict(sorted(kinds.items()))}


def acknowledge_downloads(
    recipe: Recipe, state: State, pending: Sequence[PendingTask], replies: Sequence[Reply]
) -> dict[str, Any]:
    """The downlink's memory once these replies to pending tasks are here."""
    if recipe.downlink.is_dense or MEMORY_KEY not in state.server_state:
        return {}
    piece_state = state.server_state[MEMORY_KEY]
    answers, _ = match_replies([one.task for one in pending], replies)
    for one in sorted(pending, key=lambda each: each.task.k):
        reply = answers.get(one.task.client)
        if reply is None or one.task.download is None:
            continue
        if reply.lost_base:
            piece_state = recipe.downlink.forget(piece_state, one.task.k)
        elif not reply.error and reply.payload is not None:
            piece_state = recipe.downlink.acknowledge(piece_state, one)
    return {MEMORY_KEY: piece_state}


def find_inquiry_models(
    recipe: Recipe, engine: Engine, state: State, tasks: Sequence[Task], dense_bytes: int
) -> list[tuple[Tensor, int]]:
    """Of which model each client reports its loss, and the bytes that it downloads for it."""
    if recipe.downlink.is_dense:
        return [(state.w, dense_bytes)] * len(tasks)
    piece_state, found = state.server_state.get(MEMORY_KEY), []
    for task in tasks:
        whole = replace(task, part=Portion())
        request = DownloadRequest(whole, engine.get_held_part(whole))
        model, size = recipe.downlink.get_inquiry_model(piece_state, state.w, request)
        found.append((model, dense_bytes if size is None else size))
    return found
