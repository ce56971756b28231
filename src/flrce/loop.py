"""The paper's Algorithm 4 for any recipe and engine. A generator: whoever iterates logs, saves or quits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from flrce import crossing
from flrce.engine import Engine, Notes, Shaped
from flrce.pieces import Recipe, View
from flrce.rng import stream
from flrce.room import let_go
from flrce.round.booking import book
from flrce.round.diagnostics import diagnosed
from flrce.round.ended import abandoned, not_started
from flrce.round.flights import ages, arrivals, flying, land, takeoff
from flrce.round.forecast import Refused, afford, asked_of, count_model_bytes
from flrce.round.gate import gate, kept
from flrce.round.judgement import heard, judge, vetted
from flrce.round.living import alive, awake, informed, priced, settled
from flrce.round.memory import fits, near, preflight, staff, turn
from flrce.round.returned import brought, checked, handed, reason, room, stepped, whole
from flrce.round.roster import count_absent, present, samples, without
from flrce.round.sums import joined, summed
from flrce.stops.conflict import shadows
from flrce.types import Arrivals, Event, Plan, Record, Round, Selection, State, Task, Updates

Turn = Callable[[Recipe, Engine, State, int, int], Round]  # as `a_round`


def rounds(
    recipe: Recipe, engine: Engine, state: State, T: int, seed: int, turn: Turn | None = None
) -> Iterator[Round]:
    """Algorithm 4: yields after every `turn`, a round, until T, a stop, or too many abandoned rounds in a row."""
    try:
        while state.t < T and not over(state):
            done = (turn or a_round)(recipe, engine, state, T, seed)
            yield done
            if done.record.stop:
                return
            state = done.state
            del done  # and with it the model that was handed back: it may be large
    finally:
        let_go()


def a_round(recipe: Recipe, engine: Engine, state: State, T: int, seed: int) -> Round:
    """One round."""
    plan = begin(recipe, engine, state, seed, T)
    came = Arrivals() if plan.refused else arrivals(recipe, engine, plan.flights, state, plan.keep)
    with turn(engine):
        return finish(recipe, engine, plan, came, T)


def over(state: State) -> bool:
    """Whether the run was stopped; one that only ran out of clients may be resumed."""
    return bool(state.history) and bool(state.history[-1].stop) and state.history[-1].outcome != "abandoned"


def initial(recipe: Recipe, engine: Engine, w: Tensor) -> State:
    """Before the first round."""
    clients = tuple(engine.clients(0))
    preflight(recipe, len(clients), engine.trainable, len(w), near(engine), staff(engine))
    return State(0, w, {**recipe.init(len(clients), engine.trainable, len(w)), **alive(engine)}, clients)


def begin(recipe: Recipe, engine: Engine, state: State, seed: int, T: int = 0) -> Plan:
    """Choose C_t and say what each client is to do."""
    t = state.t + 1
    purpose = f"select{state.attempt or ''}"  # another try at the same round draws anew
    under_way = flying(recipe, state)
    now, here = awake(recipe, engine, state, t, under_way)
    state, pool = present(state, tuple(here), lambda M: fits(recipe, M, engine.trainable, len(state.w), near(engine)))
    roster = state.roster
    busy = {flight.task.k for flight in under_way}
    pool = without(pool, busy) if busy else pool
    asked: list[int] = []

    def draft(k: int) -> Task:
        return Task(
            roster[k], k, t, seed, recipe.work, update=recipe.chain, augment=recipe.augment,
            compressor=recipe.compressor, rounds=T,
        )  # fmt: skip

    def loss(rows: Sequence[int]) -> Tensor:
        tasks = recipe.tasks(Selection(tuple(rows)), state.memory, view)
        clients = [roster[k] for k in rows]
        afford(recipe, engine, state, tasks, clients, some=True)  # nobody is asked for a round that is not paid for
        asked.extend(rows)
        return engine.losses(state.w, clients)

    n = samples(engine, roster)
    P = room(recipe.pace, recipe.pace.room(recipe.P, len(busy)))
    view = View(t, P, pool, n, engine.estimate, draft, loss, state.history, engine.blocks, state.w, now)
    view = informed(view, engine, state)
    chosen, refused = Selection(()), ""
    tasks: tuple[Task, ...] = ()
    try:
        if pool and P:
            found = recipe.selector.select(state.memory.get("selector"), view, stream(seed, purpose, t))
            chosen = checked(recipe.selector, found, len(roster))
        tasks = tuple(engine.accept(task) for task in recipe.tasks(chosen, state.memory, view))
        afford(recipe, engine, state, tasks, [roster[k] for k in asked])
    except Refused as why:
        tasks, refused = (), str(why)
    notes = engine.notes(tasks) if isinstance(engine, Notes) else {}
    chosen = replace(chosen, why={**chosen.why, **notes, **count_absent(roster, pool, busy)})
    flights = takeoff(recipe, engine, state, tasks, under_way, now)
    keep = chosen.keep or recipe.pace.keep(recipe.P)
    return Plan(state, t, chosen, flights, tuple(roster[k] for k in asked), refused, n, keep, now)


def finish(recipe: Recipe, engine: Engine, plan: Plan, came: Arrivals, T: int | None = None) -> Round:
    """Check the replies, aggregate, remember, judge; or abandon the round with everything as it was."""
    state, t = plan.state, plan.t
    asked = asked_of(engine, plan.asked, {task.client for task in plan.tasks}, count_model_bytes(engine, state.w))
    if plan.refused:
        return not_started(recipe, engine, plan, asked)
    judges = {flight.task.client for flight in plan.flights if flight.task.judge}
    replies = vetted(came.replies, engine, judges)
    landing = land(recipe, plan, came)
    w = state.w if came.sent is None else came.sent  # where the updates are
    updates, rejected = gate(
        landing.tasks, replies, engine.holdings, len(w), engine.trainable, plan.keep, w, known=plan.n,
        bases=landing.bases, t=t, oldest=landing.oldest, table=came.table,
    )  # fmt: skip
    price = priced(engine, plan)
    clients, costs = book(t, landing.tasks, replies, rejected, asked, landing.seconds, plan.keep, price)
    landing = replace(landing, memory={**landing.memory, **settled(engine, plan, clients)})
    record = Record(
        t=t, exploit=plan.chosen.exploit, chosen=tuple(task.client for task in plan.tasks),
        replied=tuple(state.roster[k] for k in updates.k.tolist()), rejected=rejected, why=plan.chosen.why,
        ages=ages(state.roster, updates), clients=len(state.roster), began=plan.began, **costs,
    )  # fmt: skip
    record = heard(record, replies, engine)
    if recipe.sums and len(updates):
        updates, record = summed(updates), joined(record)
    if len(record.replied) < recipe.minimum:
        return abandoned(recipe, engine, state, landing, record, clients)
    if isinstance(engine, Shaped):
        updates = replace(updates, shapes=engine.shapes)
    event, memory = _stepped(recipe, engine, plan, replace(updates, sent=came.sent))
    memory = {**memory, **landing.memory}
    model = handed(recipe.average, recipe.average.model(memory.get("average"), event.w_next), event.w_next)
    after = State(t, event.w_next, memory, state.roster, {**state.carry, **kept(landing.tasks, replies)})
    record = diagnosed(record, recipe, state, after, event)
    record = judge(record, engine, after, model)
    record = replace(record, shadow=shadows(state.history, record, recipe.P))
    history = (*state.history, record)
    stop = reason(recipe.stop, history)  # Algorithm 3
    if (stop or t == T) and record.headline is None:
        record = judge(record, engine, after, model, last=True)
    if stop or record is not history[-1]:
        record = replace(record, stop=stop)
        history = (*state.history, record)
    touched = dict.fromkeys(task.k for task in (*plan.tasks, *landing.tasks))  # the chosen first, as they were chosen
    return Round(replace(after, history=history), record, clients, tuple(touched), model)


def _stepped(recipe: Recipe, engine: Engine, plan: Plan, updates: Updates) -> tuple[Event, dict[str, Any]]:
    """From the updates to the next model, and what every piece remembers of them."""
    state = plan.state
    w = state.w if updates.sent is None else updates.sent
    target = recipe.aggregator(w, updates, state.memory.get("aggregator"))  # eq. 4
    whole(recipe.aggregator, target, w)
    if "server" in state.memory:  # what it remembers is on the host
        w, target = state.w, crossing.home(target)
    found = recipe.server.step(w, target, updates, state.memory.get("server"))
    w_next, server = stepped(recipe.server, found, target, w)
    event = Event(plan.t, state.w, brought(engine, w_next), updates, len(state.roster), plan.chosen.k, state.history)
    before = {**state.memory, "server": server} if "server" in state.memory else state.memory
    return event, recipe.observe(before, event)
