"""Tasks under way: sent in this round or an earlier one, back in this round or a later one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flrce.engine import Asynchronous, Engine
from flrce.pieces import Recipe
from flrce.round.living import comes_back, cut
from flrce.round.pace import Sky, due
from flrce.round.packing import can_wait, packed, unpacked
from flrce.traits import Buffers
from flrce.types import Arrivals, Flight, Laid, Plan, Reply, State, Task, Updates


@dataclass(frozen=True)
class Landing:
    """Which tasks a round answers for, and what is still under way after it."""

    tasks: tuple[Task, ...]
    bases: Mapping[str, Tensor] = field(default_factory=dict)  # client -> the model it was sent, if not this round's
    seconds: float | None = None  # how long the round lasted; None: as its replies say
    oldest: int | None = None  # replies that are more rounds old do not count
    memory: Mapping[str, Any] = field(default_factory=dict)  # the pace's, after the round


def flying(recipe: Recipe, state: State) -> list[Flight]:
    """What is under way before the round begins."""
    sky = state.memory.get("pace")
    if not isinstance(sky, Sky):
        return []
    return unpacked(recipe, sky)


def takeoff(
    recipe: Recipe, engine: Engine, state: State, tasks: Sequence[Task], under_way: Sequence[Flight], now: float = 0.0
) -> tuple[Flight, ...]:
    """Everything under way once this round's tasks are sent."""
    if not isinstance(recipe.pace, Buffers):
        return tuple(Flight(task, state.w, now) for task in tasks)
    can_wait(recipe, tasks)
    back = comes_back(engine, state, tasks, now)
    return (*under_way, *(Flight(task, state.w, now, at) for task, at in zip(tasks, back, strict=True)))


def arrivals(recipe: Recipe, engine: Engine, flights: Sequence[Flight], state: State, keep: int | None) -> Arrivals:
    """The replies of a round."""
    buffers = recipe.pace if isinstance(recipe.pace, Buffers) else None
    size = buffers.size if buffers else keep
    if isinstance(engine, Asynchronous):
        engine.send(flights, state.carry)
        return engine.collect(flights, size, open_ended=buffers is not None)
    if buffers:
        return Arrivals(by_the_model(engine, flights, buffers.size, state))
    replies = engine.train(state.w, [flight.task for flight in flights], state.carry, keep)
    table, sent = (replies.table, replies.sent) if isinstance(replies, Laid) else (None, None)
    return Arrivals(cut(engine, state, flights, replies), table=table, sent=sent)


def by_the_model(engine: Engine, flights: Sequence[Flight], size: int, state: State) -> list[Reply]:
    """The replies that the model of their costs has come back first; nobody trains before that."""
    replies: list[Reply] = []
    rest, open_ = list(flights), size
    while rest and open_ > 0:  # clients that went while they worked bring nothing
        back, rest = due(rest, open_)
        for t in sorted({flight.task.t for flight in back}):
            group = [flight for flight in back if flight.task.t == t]
            come = engine.train(group[0].w, [flight.task for flight in group], state.carry)
            replies += cut(engine, state, group, come)
        open_ = size - sum(not reply.error for reply in replies)
    return replies


def land(recipe: Recipe, plan: Plan, came: Arrivals) -> Landing:
    """Whose replies the round is about, and what goes on."""
    flights, began = plan.flights, plan.began
    if not isinstance(recipe.pace, Buffers):
        return Landing(tuple(flight.task for flight in flights))
    answered = {(reply.client, reply.t) for reply in came.replies if isinstance(reply, Reply)}
    back = [flight for flight in flights if (flight.task.client, flight.task.t) in answered]
    rest = [flight for flight in flights if (flight.task.client, flight.task.t) not in answered]
    clock = max([began, *(flight.due for flight in back)])
    if came.seconds is not None:  # measured
        clock = began + came.seconds
    sky = packed(recipe, plan.state.memory["pace"], rest, clock)
    return Landing(
        tuple(flight.task for flight in back), {flight.task.client: flight.w for flight in back},
        clock - began, recipe.pace.oldest, {"pace": sky},
    )  # fmt: skip


def ages(roster: Sequence[str], updates: Updates) -> dict[str, int]:
    """Client -> how many rounds old its reply is, for those that are not of this round."""
    if updates.age is None:
        return {}
    return {roster[k]: age for k, age in zip(updates.k.tolist(), updates.age.tolist(), strict=True) if age}
