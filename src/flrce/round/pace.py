"""When is a round over? Everybody's reply, the fastest, those in time, or the first few of many under way."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from flrce.bounds import Amount, Count, Positive, Whole
from flrce.errors import BadInput
from flrce.pieces import Recipe
from flrce.types import Flight, Portion, Task, Work


@dataclass(frozen=True)
class Fastest:
    """Over-commitment (Bonawitz et al. 2019): `spares` more than P are asked, as a share of P; the P fastest count."""

    spares: Amount = 0.3

    def room(self, P: int, busy: int) -> int:
        return P + math.ceil(self.spares * P - 1e-9)

    def keep(self, P: int) -> int | None:
        return P


@dataclass(frozen=True)
class Deadline:
    """A reply later than so many seconds does not count."""

    seconds: Positive = 60.0

    def room(self, P: int, busy: int) -> int:
        return P

    def keep(self, P: int) -> int | None:
        return None

    def told(self, task: Task) -> Task:
        return replace(task, deadline=min(task.deadline, self.seconds))


@dataclass(frozen=True)
class Sky:
    """Tasks under way when a round ends: from which model each started, and when."""

    bases: dict[int, Tensor] = field(default_factory=dict)  # round -> the w that its clients were sent
    flights: tuple[Any, ...] = ()  # plain data, one for each task (see `packed`)
    clock: float = 0.0  # seconds since the run began


@dataclass(frozen=True)
class Buffered:
    """FedBuff (Nguyen et al. 2022): P clients are always under way; a round ends with the first `size` replies.

    The others go on, from the model they were sent; their replies count when they come, `updates.age` rounds old.
    Replies older than `oldest` rounds are dropped. What of a task is not the recipe's own (a compressor tuned for one
    client, tensors sent along) cannot wait, so recipes that need it are refused.
    """

    size: Count = 10
    oldest: Whole = 100

    def init(self, M: int, d: int, D: int) -> Sky:
        return Sky()

    def objection(self, recipe: Recipe) -> str:
        if self.size > recipe.P:
            return f"pace.size = {self.size}: at most per_round = {recipe.P} replies are ever under way; lower it"
        return ""

    def room(self, P: int, busy: int) -> int:
        return P - busy

    def keep(self, P: int) -> int | None:
        return None


def packed(flight: Flight) -> dict[str, Any]:
    """A flight as plain data that a checkpoint holds; its model is kept by round."""
    task = flight.task
    return {
        "client": task.client, "k": task.k, "t": task.t, "seed": task.seed, "rounds": task.rounds,
        "deadline": None if math.isinf(task.deadline) else task.deadline, "sent": flight.sent, "due": flight.due,
        "judge": task.judge, "work": _plain(task.work), "part": _plain(task.part),
    }  # fmt: skip


def unpacked(row: Mapping[str, Any], recipe: Recipe, bases: Mapping[int, Tensor]) -> Flight:
    """The flight that `packed` wrote."""
    task = Task(
        row["client"], row["k"], row["t"], row["seed"], Work(**row["work"]), Portion(**row["part"]),
        update=recipe.chain, augment=recipe.augment, compressor=recipe.compressor, rounds=row["rounds"],
        deadline=math.inf if row["deadline"] is None else row["deadline"], judge=row.get("judge", False),
    )  # fmt: skip
    return Flight(task, bases[row["t"]], row["sent"], row["due"])


def can_wait(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """BadInput where a task holds more than a checkpoint of tasks under way can."""
    for task in tasks:
        if task.tensors or task.compressor != recipe.compressor or task.update != recipe.chain:
            name = type(recipe.trainer).__name__
            raise BadInput(f"pace = buffered does not go with {name}: its tasks hold what only this round knows")


def due(flights: Sequence[Flight], size: int) -> tuple[list[Flight], list[Flight]]:
    """(the first `size` to come back, the others); ties by name."""
    order = sorted(flights, key=lambda flight: (flight.due, flight.task.client))
    return order[:size], order[size:]


def _plain(piece: Any) -> dict[str, Any]:
    return {f.name: getattr(piece, f.name) for f in fields(piece)}
