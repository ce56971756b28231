"""Tasks under way as plain data and tensors that a checkpoint holds, and back to the same bits.

A task's pieces are the recipe's with other numbers, such as a compressor's rate for one client: what differs is
written. Tensors are numbered, each kept once however many tasks were sent it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from flrce.errors import BadInput
from flrce.pieces import Dense, Recipe
from flrce.round.pace import Sky
from flrce.types import Flight, Portion, Task, Work

Changes = dict[str, Any]  # "field.of.field" -> value


@dataclass(frozen=True)
class OtherMake(Exception):
    """A piece that is not the recipe's with other numbers."""

    what: str


class Row(dict[str, Any]):
    """A flight as plain data that also remembers it: of many under way, few change in a round."""

    def __init__(self, data: Any = (), flight: Flight | None = None) -> None:
        super().__init__(data)
        self.flight = flight


def packed(recipe: Recipe, before: Sky, flights: Sequence[Flight], clock: float) -> Sky:
    """What is under way after a round; `before` it, tensors had numbers that they keep."""
    numbers = {id(tensor): number for number, tensor in before.tensors.items()}
    kept: dict[int, Tensor] = {}
    free = 1 + max(before.tensors, default=0)
    for flight in flights:
        for tensor in flight.task.tensors.values():
            number = numbers.setdefault(id(tensor), free)
            free = max(free, number + 1)
            kept[number] = tensor
    known = {id(row.flight): row for row in before.flights if isinstance(row, Row)}
    rows = tuple(known.get(id(flight)) or Row(_row(recipe, flight, numbers), flight) for flight in flights)
    return Sky({flight.task.t: flight.w for flight in flights}, rows, clock, kept)


def unpacked(recipe: Recipe, sky: Sky) -> list[Flight]:
    """The flights that `packed` wrote."""
    found: list[Flight] = []
    for row in sky.flights:
        known = row.flight if isinstance(row, Row) else None  # rows of a checkpoint remember nothing
        found.append(known or _flight(recipe, sky, row))
    return found


def can_wait(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """BadInput where a task holds pieces that are not the recipe's with other numbers."""
    for task in tasks:
        try:
            _changes_of(recipe, task)
        except OtherMake as odd:
            name = type(recipe.trainer).__name__
            raise BadInput(f"pace = buffered does not go with {name}: a task under way is kept as the recipe's pieces "
                           f"with other numbers, and {odd.what}") from None  # fmt: skip


def _row(recipe: Recipe, flight: Flight, numbers: Mapping[int, int]) -> dict[str, Any]:
    task = flight.task
    return {
        "client": task.client, "k": task.k, "t": task.t, "seed": task.seed, "rounds": task.rounds,
        "deadline": None if math.isinf(task.deadline) else task.deadline, "sent": flight.sent, "due": flight.due,
        "judge": task.judge, "work": _plain(task.work), "part": _plain(task.part),
        "tensors": {name: numbers[id(tensor)] for name, tensor in task.tensors.items()},
        **_changes_of(recipe, task),
    }  # fmt: skip


def _flight(recipe: Recipe, sky: Sky, row: Mapping[str, Any]) -> Flight:
    compressor = Dense() if row.get("dense") else changed(recipe.compressor, row.get("compressor", {}))
    task = Task(
        row["client"], row["k"], row["t"], row["seed"], Work(**row["work"]), Portion(**row["part"]),
        update=changed(recipe.chain, row.get("update", {})), augment=recipe.augment, compressor=compressor,
        rounds=row["rounds"], deadline=math.inf if row["deadline"] is None else row["deadline"],
        judge=row.get("judge", False),
        tensors={name: sky.tensors[number] for name, number in row.get("tensors", {}).items()},
    )  # fmt: skip
    return Flight(task, sky.bases[row["t"]], row["sent"], row["due"])


def _changes_of(recipe: Recipe, task: Task) -> dict[str, Any]:
    """What of a task's pieces is not the recipe's own. A client that cannot compress was told to send all."""
    dense = type(task.compressor) is Dense
    return {
        "dense": dense, "update": changes(task.update, recipe.chain),
        "compressor": {} if dense else changes(task.compressor, recipe.compressor),
    }  # fmt: skip


def changes(piece: Any, like: Any) -> Changes:
    """Where a piece differs from another of the same make; OtherMake where it is of another."""
    if piece is like or (type(piece) is type(like) and piece == like):
        return {}
    if type(piece) is type(like) and is_dataclass(piece):
        parts = {f.name: (getattr(piece, f.name), getattr(like, f.name)) for f in fields(piece) if f.init}
    elif isinstance(piece, tuple) and isinstance(like, tuple) and len(piece) == len(like):
        parts = {str(i): pair for i, pair in enumerate(zip(piece, like, strict=True))}
    elif _number(piece) and _number(like):
        return {"": piece}
    else:
        raise OtherMake(f"{type(piece).__name__} is not its {type(like).__name__}")
    found: Changes = {}
    for name, (ours, theirs) in parts.items():
        found |= {f"{name}.{path}" if path else name: value for path, value in changes(ours, theirs).items()}
    return found


def changed(like: Any, told: Changes) -> Any:
    """The piece that differs so from this one."""
    if not told:
        return like
    if "" in told:
        return told[""]
    inner: dict[str, Changes] = {}
    for path, value in told.items():
        name, _, rest = path.partition(".")
        inner.setdefault(name, {})[rest] = value
    if isinstance(like, tuple):
        return tuple(changed(part, inner.get(str(i), {})) for i, part in enumerate(like))
    return replace(like, **{name: changed(getattr(like, name), part) for name, part in inner.items()})


def _number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _plain(piece: Any) -> dict[str, Any]:
    return {f.name: getattr(piece, f.name) for f in fields(piece)}
