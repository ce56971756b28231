"""Rounds by the clock: when one begins, who can be asked then, and who went while it worked."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from flrce.pieces import Engine, Recipe
from flrce.traits import Lives
from flrce.types import Flight, Record, Reply, State, Task


def clock(history: Sequence[Record]) -> float:
    """Seconds since the run began: the end of its last round."""
    return history[-1].began + history[-1].seconds if history else 0.0


def elapsed(history: Sequence[Record]) -> float:
    """The same of records that may come from before rounds knew when they began."""
    now = 0.0
    for record in history:
        now = max(record.began, now) + record.seconds
    return now


def dated(history: Iterable[Record]) -> tuple[Record, ...]:
    """Records with the second at which each began; those that know it keep it."""
    found: list[Record] = []
    for record in history:
        began = max(record.began, clock(found))
        found.append(record if began == record.began else replace(record, began=began))
    return tuple(found)


def awake(
    recipe: Recipe, engine: Engine, state: State, t: int, under_way: Sequence[Flight]
) -> tuple[float, Sequence[str]]:
    """When round t begins, and who can be reached then.

    A round waits until as many are there as it needs replies, unless some are under way.
    """
    now = clock(state.history)
    if not isinstance(engine, Lives) or engine.life is None:
        return now, engine.clients(t)
    if not under_way:
        now = engine.life.enough(now, recipe.minimum)
    return now, engine.life.here(now)


def comes_back(engine: Engine, tasks: Sequence[Task], now: float) -> list[float]:
    """When each client will have done its task by the model of its costs, or will have left."""
    estimates = [engine.estimate(task) for task in tasks]
    if isinstance(engine, Lives) and engine.life is not None and tasks:
        found = engine.life.works([task.client for task in tasks], [now] * len(tasks), estimates)
        estimates = [spent for spent, _ in found]
    return [now + spent.seconds for spent in estimates]


def cut(engine: Engine, flights: Sequence[Flight], replies: Sequence[Reply]) -> Sequence[Reply]:
    """The replies to these tasks, but for clients that were gone before they had finished: of these, what they had
    spent."""
    if not isinstance(engine, Lives) or engine.life is None or not replies:
        return replies
    sent = {flight.task.client: flight.sent for flight in flights}
    began = [sent[reply.client] for reply in replies]
    found = engine.life.works([reply.client for reply in replies], began, [reply.spent for reply in replies])
    return [
        Reply(reply.client, reply.t, error=why, spent=spent) if why else reply
        for reply, (spent, why) in zip(replies, found, strict=True)
    ]
