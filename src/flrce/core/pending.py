"""Models and tasks on their way: encoded and sent in this round or an earlier one, back in this
round or a later one.

A client that replied has decoded its model, whether or not its reply counts. Of a client without a
reply nothing is known: the next difference refers to the model that it acknowledged last, which
clients keep beside the newest one.

Tasks that outlive a round are kept as plain data and tensors that a checkpoint holds. A task's
pieces are the recipe's with other numbers, such as a compressor's rate for one client: what differs
is written. Tensors are numbered, each kept once however many tasks were sent it.
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from flrce.core.downlink import DownloadRequest, EncodedModel
from flrce.core.engine import Engine, drop_departed_clients, estimate_return_times
from flrce.core.gate import match_replies
from flrce.core.pieces import NoCompression, Recipe
from flrce.core.types import (
    Download,
    LocalWork,
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
class AsyncState:
    """Tasks under way when a round ends: from which model each started, and when."""

    # round -> the w that its clients were sent
    bases: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})
    # one for each task (core/pending.py); checkpoints have it under this name
    flights: tuple[Any, ...] = field(default=(), metadata={"plain": True})
    clock: float = 0.0  # seconds since the run began
    # number -> what was sent along with tasks
    tensors: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})


def split_due_tasks(
    pending: Sequence[PendingTask], size: int
) -> tuple[list[PendingTask], list[PendingTask]]:
    """(the first `size` to come back, the others); ties by name."""
    first = heapq.nsmallest(size, pending, key=lambda one: (one.due, one.task.client))
    gone = set(map(id, first))
    return first, [one for one in pending if id(one) not in gone]


FieldChanges = dict[str, Any]  # "field.of.field" -> value


@dataclass(frozen=True)
class IncompatiblePiece(Exception):
    """A piece that is not the recipe's with other numbers."""

    what: str


class PackedTask(dict[str, Any]):
    """A pending task as plain data that also remembers it: few of many change in a round."""

    def __init__(self, data: Any = (), pending: PendingTask | None = None) -> None:
        super().__init__(data)
        self.pending = pending


def pack_pending_tasks(
    recipe: Recipe, before: AsyncState, pending: Sequence[PendingTask], clock: float
) -> AsyncState:
    """What is under way after a round; `before` it, tensors had numbers that they keep."""
    numbers = {id(tensor): number for number, tensor in before.tensors.items()}
    kept: dict[int, Tensor] = {}
    free = 1 + max(before.tensors, default=0)
    for sent_task in pending:
        own = [sent_task.w] if sent_task.task.download else []  # models that a client alone has
        for tensor in (*sent_task.task.tensors.values(), *own):
            number = numbers.setdefault(id(tensor), free)
            free = max(free, number + 1)
            kept[number] = tensor
    packed = {id(row.pending): row for row in before.flights if isinstance(row, PackedTask)}
    rows = tuple(
        packed.get(id(sent_task)) or PackedTask(_pack_task(recipe, sent_task, numbers), sent_task)
        for sent_task in pending
    )
    bases = {one.task.t: one.w for one in pending if one.task.download is None}
    return AsyncState(bases, rows, clock, kept)


def unpack_pending_tasks(recipe: Recipe, async_state: AsyncState) -> list[PendingTask]:
    """The pending tasks that `pack_pending_tasks` wrote."""
    tasks: list[PendingTask] = []
    for row in async_state.flights:
        # rows of a checkpoint remember nothing
        remembered = row.pending if isinstance(row, PackedTask) else None
        tasks.append(remembered or _unpack_task(recipe, async_state, row))
    return tasks


def validate_packable(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """BadInput where a task holds pieces that are not the recipe's with other numbers."""
    for task in tasks:
        try:
            _find_task_changes(recipe, task)
        except IncompatiblePiece as odd:
            name = type(recipe.trainer).__name__
            raise BadInput(
                f"pace = buffered does not go with {name}: a task under way is kept as the recipe's"
                f" pieces with other numbers, and {odd.what}"
            ) from None


def _pack_task(recipe: Recipe, one: PendingTask, numbers: Mapping[int, int]) -> dict[str, Any]:
    task = one.task
    return {
        "client": task.client,
        "k": task.k,
        "t": task.t,
        "seed": task.seed,
        "rounds": task.rounds,
        "deadline": None if math.isinf(task.deadline) else task.deadline,
        "sent": one.sent,
        "due": one.due,
        "judge": task.judge,
        "work": _to_dict(task.work),
        "part": _to_dict(task.part),
        "tensors": {name: numbers[id(tensor)] for name, tensor in task.tensors.items()},
        **_pack_download(one, numbers),
        **_find_task_changes(recipe, task),
    }


def _pack_download(one: PendingTask, numbers: Mapping[int, int]) -> dict[str, Any]:
    """A download that was encoded, and where the model is that its client decodes."""
    download = one.task.download
    if download is None:
        return {}
    return {"download": {**_to_dict(replace(download, code=None)), "model": numbers[id(one.w)]}}


def _unpack_task(recipe: Recipe, async_state: AsyncState, row: Mapping[str, Any]) -> PendingTask:
    compressor = (
        NoCompression()
        if row.get("dense")
        else apply_changes(recipe.compressor, row.get("compressor", {}))
    )
    task = Task(
        row["client"],
        row["k"],
        row["t"],
        row["seed"],
        LocalWork(**row["work"]),
        Portion(**row["part"]),
        update=apply_changes(recipe.chain, row.get("update", {})),
        augment=recipe.augment,
        compressor=compressor,
        rounds=row["rounds"],
        deadline=math.inf if row["deadline"] is None else row["deadline"],
        judge=row.get("judge", False),
        tensors={
            name: async_state.tensors[number] for name, number in row.get("tensors", {}).items()
        },
    )
    if "download" not in row:
        return PendingTask(task, async_state.bases[row["t"]], row["sent"], row["due"])
    download = dict(row["download"])
    model = async_state.tensors[download.pop("model")]
    task = replace(task, download=Download(**download))
    return PendingTask(task, model, row["sent"], row["due"])


def _find_task_changes(recipe: Recipe, task: Task) -> dict[str, Any]:
    """What of a task's pieces is not the recipe's own. A client that cannot compress was told to
    send all.
    """
    dense = task.compressor.is_dense
    return {
        "dense": dense,
        "update": find_changes(task.update, recipe.chain),
        "compressor": {} if dense else find_changes(task.compressor, recipe.compressor),
    }


def find_changes(piece: Any, like: Any) -> FieldChanges:
    """Where a piece differs from another of the same make; OtherMake where it is of another."""
    if piece is like or (type(piece) is type(like) and piece == like):
        return {}
    if type(piece) is type(like) and is_dataclass(piece):
        parts = {
            f.name: (getattr(piece, f.name), getattr(like, f.name)) for f in fields(piece) if f.init
        }
    elif isinstance(piece, tuple) and isinstance(like, tuple) and len(piece) == len(like):
        parts = {str(i): pair for i, pair in enumerate(zip(piece, like, strict=True))}
    elif _is_scalar(piece) and _is_scalar(like):
        return {"": piece}
    else:
        raise IncompatiblePiece(f"{type(piece).__name__} is not its {type(like).__name__}")
    changes: FieldChanges = {}
    for name, (ours, theirs) in parts.items():
        changes |= {
            f"{name}.{path}" if path else name: value
            for path, value in find_changes(ours, theirs).items()
        }
    return changes


def apply_changes(like: Any, told: FieldChanges) -> Any:
    """The piece that differs so from this one."""
    if not told:
        return like
    if "" in told:
        return told[""]
    inner: dict[str, FieldChanges] = {}
    for path, value in told.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = value
    if isinstance(like, tuple):
        return tuple(apply_changes(part, inner.get(str(i), {})) for i, part in enumerate(like))
    return replace(
        like, **{name: apply_changes(getattr(like, name), part) for name, part in inner.items()}
    )


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _to_dict(piece: Any) -> dict[str, Any]:
    return {f.name: getattr(piece, f.name) for f in fields(piece)}


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
    device = engine.code_device
    requests = [DownloadRequest(tasks[i], engine.get_held_part(tasks[i]), device) for i in coded]
    piece_state = state.server_state.get(MEMORY_KEY)
    with engine.device_lock if device.type != "cpu" else nullcontext():
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


def count_download_kinds(
    recipe: Recipe, engine: Engine, models: Sequence[EncodedModel]
) -> dict[str, Any]:
    """For the ledger: how many downloads of each kind a round has; nothing where all are dense."""
    if recipe.downlink.is_dense or not models:
        return {}
    kinds = Counter(engine.get_download_kind(model) for model in models)
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
    piece_state, models = state.server_state.get(MEMORY_KEY), []
    for task in tasks:
        whole = replace(task, part=Portion())
        request = DownloadRequest(whole, engine.get_held_part(whole))
        model, size = recipe.downlink.get_inquiry_model(piece_state, state.w, request)
        models.append((model, dense_bytes if size is None else size))
    return models
