"""Tasks that outlive a round: which come back first, and what is kept of them between rounds, as
plain data and tensors that a checkpoint holds.

A task's pieces are the recipe's with other numbers, such as a compressor's rate for one client:
what differs is written. Tensors are numbered, each kept once however many tasks were sent it."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from flrce.core.pieces import NoCompression, Recipe
from flrce.core.types import Download, LocalWork, PendingTask, Portion, Task
from flrce.errors import BadInput


@dataclass(frozen=True)
class AsyncState:
    """Tasks under way when a round ends: from which model each started, and when."""

    # round -> the w that its clients were sent
    bases: dict[int, Tensor] = field(default_factory=dict, metadata={"rounds": True})
    # one for each task (core/async_state.py); checkpoints have it under this name
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
    known = {id(row.pending): row for row in before.flights if isinstance(row, PackedTask)}
    rows = tuple(
        known.get(id(sent_task)) or PackedTask(_pack_task(recipe, sent_task, numbers), sent_task)
        for sent_task in pending
    )
    bases = {one.task.t: one.w for one in pending if one.task.download is None}
    return AsyncState(bases, rows, clock, kept)


def unpack_pending_tasks(recipe: Recipe, async_state: AsyncState) -> list[PendingTask]:
    """The pending tasks that `pack_pending_tasks` wrote."""
    found: list[PendingTask] = []
    for row in async_state.flights:
        # rows of a checkpoint remember nothing
        known = row.pending if isinstance(row, PackedTask) else None
        found.append(known or _unpack_task(recipe, async_state, row))
    return found


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
    known = dict(row["download"])
    model = async_state.tensors[known.pop("model")]
    task = replace(task, download=Download(**known))
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
    found: FieldChanges = {}
    for name, (ours, theirs) in parts.items():
        found |= {
            f"{name}.{path}" if path else name: value
            for path, value in find_changes(ours, theirs).items()
        }
    return found


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
