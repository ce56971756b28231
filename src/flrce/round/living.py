"""Rounds by the clock: when one begins, who can be asked then, who went while it worked, and what that emitted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flrce.engine import Engine, Lives, Reports
from flrce.pieces import Recipe, View
from flrce.traits import Begins
from flrce.types import ClientRecord, Flight, Plan, Record, Reply, Spent, State, Task

FLEET = "fleet"  # where a state's memory has the batteries


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


def life_of(engine: Engine) -> Any:
    """How the engine's clients live; None: all are always there."""
    return engine.life if isinstance(engine, Lives) else None


def alive(engine: Engine) -> dict[str, Any]:
    """What the fleet remembers before the first round."""
    life = life_of(engine)
    charge = None if life is None else life.init()
    return {} if charge is None else {FLEET: charge}


def awake(
    recipe: Recipe, engine: Engine, state: State, t: int, under_way: Sequence[Flight]
) -> tuple[float, Sequence[str]]:
    """When round t begins, and who can be reached then.

    A round waits for what its pace wants, and until as many are there as it needs replies, unless some are under way.
    """
    now, life = clock(state.history), life_of(engine)
    if life is None:
        return now, engine.clients(t)
    charge = state.memory.get(FLEET)
    if isinstance(recipe.pace, Begins) and life.grid is not None:
        now = recipe.pace.begins(now, life.grid.ahead(now, recipe.pace.look))
    if not under_way:
        now = life.enough(now, recipe.minimum, charge)
    return now, life.here(now, charge)


def informed(view: View, engine: Engine, state: State) -> View:
    """The view with what a fleet that lives can report: levels of batteries, carbon intensities."""
    life, roster = life_of(engine), state.roster
    if isinstance(engine, Reports) and engine.levels(roster) is not None:
        return replace(view, battery=lambda k: _told(engine.levels(roster), k))
    if life is None:
        return view
    charge = state.memory.get(FLEET)
    held = None if charge is None else lambda k: life.held([roster[row] for row in k], view.now, charge)
    dirt = None if life.grid is None else lambda k: life.intensity([roster[row] for row in k], view.now)
    return replace(view, battery=held, intensity=dirt)


def _told(levels: Any, k: Sequence[int]) -> Any:
    return levels[list(k)]


def comes_back(engine: Engine, state: State, tasks: Sequence[Task], now: float) -> list[float]:
    """When each client will have done its task by the model of its costs, or will have left."""
    estimates, life = [engine.estimate(task) for task in tasks], life_of(engine)
    if life is not None and tasks:
        works = [(task.client, now, spent) for task, spent in zip(tasks, estimates, strict=True)]
        estimates = [spent for spent, _ in life.works(works, state.memory.get(FLEET))]
    return [now + spent.seconds for spent in estimates]


def cut(engine: Engine, state: State, flights: Sequence[Flight], replies: Sequence[Reply]) -> Sequence[Reply]:
    """The replies to these tasks; of clients that were gone before they had finished, only what they had spent."""
    life = life_of(engine)
    if life is None or not replies:
        return replies
    sent = {flight.task.client: flight.sent for flight in flights}
    works = [(reply.client, sent[reply.client], reply.spent) for reply in replies]
    ends = life.works(works, state.memory.get(FLEET))
    return [
        Reply(reply.client, reply.t, error=why, spent=spent) if why else reply
        for reply, (spent, why) in zip(replies, ends, strict=True)
    ]


def priced(engine: Engine, plan: Plan) -> Callable[[Sequence[ClientRecord]], list[ClientRecord]]:
    """Puts down on each client's line what its work emitted."""
    life = life_of(engine)

    def price(lines: Sequence[ClientRecord]) -> list[ClientRecord]:
        if life is None or life.grid is None:
            return list(lines)
        grams = life.grams(_works(plan, lines))
        return [replace(line, spent=replace(line.spent, grams=each)) for line, each in zip(lines, grams, strict=True)]

    return price


def with_grams(engine: Engine, state: State, tasks: Sequence[Task], spent: Sequence[Spent]) -> list[Spent]:
    """Estimates with what they would emit if the work began now."""
    life = life_of(engine)
    if life is None or life.grid is None:
        return list(spent)
    now = clock(state.history)
    grams = life.grams([(task.client, now, each) for task, each in zip(tasks, spent, strict=True)])
    return [replace(each, grams=amount) for each, amount in zip(spent, grams, strict=True)]


def settled(engine: Engine, plan: Plan, lines: Sequence[ClientRecord]) -> dict[str, Any]:
    """The fleet's memory after the round."""
    charge = plan.state.memory.get(FLEET)
    if charge is None:
        return {}
    asked = {flight.task.client for flight in plan.flights}
    mine = [line for line in lines if line.client in asked and line.outcome != "asked"]
    return {FLEET: life_of(engine).settled(_works(plan, mine), charge)}


def _works(plan: Plan, lines: Sequence[ClientRecord]) -> list[tuple[str, float, Spent]]:
    sent = {flight.task.client: flight.sent for flight in plan.flights}
    return [(line.client, sent.get(line.client, plan.began), line.spent) for line in lines]
