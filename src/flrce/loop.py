"""The paper's Algorithm 4 for any recipe and engine. A generator: whoever iterates logs, saves or quits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flrce.linalg import conflicts, consensus, gram
from flrce.pieces import Engine, Recipe, View
from flrce.rng import stream
from flrce.round.booking import book
from flrce.round.forecast import Refused, afford, asked_of
from flrce.round.gate import gate, kept
from flrce.round.judgement import judged
from flrce.round.memory import preflight
from flrce.round.roster import present, samples
from flrce.round.trust import flags, silenced, votes
from flrce.stops.conflict import shadows
from flrce.types import Event, Record, Reply, Round, Selection, Spent, State, Task

GIVE_UP = 3  # abandoned rounds in a row that end a run


@dataclass(frozen=True)
class Plan:
    """Round t before it is run."""

    state: State
    t: int
    chosen: Selection
    tasks: tuple[Task, ...]
    asked: tuple[str, ...] = ()  # clients that were asked for their loss
    refused: str = ""  # why the round is not started
    n: Tensor | None = None  # (M,) samples as known before the round


def rounds(recipe: Recipe, engine: Engine, state: State, T: int, seed: int) -> Iterator[Round]:
    """Algorithm 4: yields after every round, until T, a stop, or too many abandoned rounds in a row."""
    while state.t < T and not over(state):
        plan = begin(recipe, engine, state, seed, T)
        replies = () if plan.refused else engine.train(state.w, plan.tasks, state.carry)
        done = finish(recipe, engine, plan, replies, T)
        yield done
        if done.record.stop:
            return
        state = done.state


def over(state: State) -> bool:
    """Whether the run was stopped; one that only ran out of clients may be resumed."""
    return bool(state.history) and bool(state.history[-1].stop) and state.history[-1].outcome != "abandoned"


def initial(recipe: Recipe, engine: Engine, w: Tensor) -> State:
    """Before the first round."""
    clients = tuple(engine.clients())
    preflight(recipe, len(clients), engine.trainable, len(w))
    return State(0, w, recipe.init(len(clients), engine.trainable, len(w)), clients)


def begin(recipe: Recipe, engine: Engine, state: State, seed: int, T: int = 0) -> Plan:
    """Choose C_t and say what each client is to do."""
    t, purpose = state.t + 1, f"select{state.attempt or ''}"
    state, pool = present(state, tuple(engine.clients()))
    roster = state.roster
    asked: list[int] = []

    def draft(k: int) -> Task:
        return Task(
            roster[k], k, t, seed, recipe.work, update=recipe.chain, augment=recipe.augment,
            compressor=recipe.compressor, rounds=T,
        )  # fmt: skip

    def loss(rows: Sequence[int]) -> Tensor:
        tasks, clients = recipe.tasks(Selection(tuple(rows)), state.memory, view), [roster[k] for k in rows]
        afford(recipe, engine, state, tasks, clients, some=True)  # nobody is asked for a round that is not paid for
        asked.extend(rows)
        return engine.losses(state.w, clients)

    n = samples(engine, roster)
    view = View(t, recipe.P, pool, n, engine.estimate, draft, loss, state.history, getattr(engine, "blocks", 1))
    memory, rng = state.memory.get("selector"), stream(seed, purpose, t)
    chosen, refused = Selection(()), ""
    tasks: tuple[Task, ...] = ()
    try:
        chosen = recipe.selector.select(memory, view, rng) if pool else chosen
        tasks = tuple(recipe.tasks(chosen, state.memory, view))
        afford(recipe, engine, state, tasks, [roster[k] for k in asked])
    except Refused as why:
        tasks, refused = (), str(why)
    return Plan(state, t, chosen, tasks, tuple(roster[k] for k in asked), refused, n)


def finish(recipe: Recipe, engine: Engine, plan: Plan, replies: Sequence[Reply], T: int | None = None) -> Round:
    """Check the replies, aggregate, remember, judge; or abandon the round with everything as it was."""
    state, t = plan.state, plan.t
    if plan.refused:
        clients, costs = book(t, (), (), {}, _asked(engine, plan))
        record = Record(t, "not started", plan.chosen.exploit, stop=plan.refused, **costs)
        return replace(_end(recipe, engine, state, record), clients=clients)
    updates, rejected = gate(
        plan.tasks, replies, engine.holdings, len(state.w), engine.trainable, plan.chosen.keep, state.w, plan.n
    )
    clients, costs = book(t, plan.tasks, replies, rejected, _asked(engine, plan))
    record = Record(
        t=t, exploit=plan.chosen.exploit, chosen=tuple(task.client for task in plan.tasks),
        replied=tuple(state.roster[k] for k in updates.k.tolist()), rejected=rejected, why=plan.chosen.why, **costs,
    )  # fmt: skip
    if len(updates) < recipe.minimum:
        tries = state.attempt + 1
        stop = f"abandoned {tries} times in a row: {_reasons(rejected)}" if tries % GIVE_UP == 0 else ""
        return replace(_end(recipe, engine, state, replace(record, outcome="abandoned", stop=stop)), clients=clients)
    w = recipe.aggregator(state.w, updates, state.memory.get("aggregator"))  # eq. 4
    event = Event(t, state.w, w, updates, len(state.roster), plan.chosen.k)
    headway = recipe.average.headway(state.memory["average"], event) if hasattr(recipe.average, "headway") else None
    memory = recipe.observe(state.memory, event)
    model = recipe.average.model(memory.get("average"), w)
    G = gram(updates.u)
    odd = flags(G, record.replied)
    record = replace(
        record, conflicts=conflicts(G), consensus=consensus(G, updates.n), headway=headway, flagged=odd,
        votes=votes(G, record.replied, silenced(state.history, odd)),
    )  # fmt: skip
    carry = {**state.carry, **kept(plan.tasks, replies)}
    after = State(t, w, memory, state.roster, carry)
    record = _judged(record, engine, after, model)
    record = replace(record, shadow=shadows((*state.history, record), recipe.P))
    record = replace(record, stop=recipe.stop((*state.history, record)))  # Algorithm 3
    if (record.stop or t == T) and record.headline is None:
        record = _judged(record, engine, after, model, last=True)
    return Round(
        replace(after, history=(*state.history, record)), record, clients, tuple(task.k for task in plan.tasks), model
    )


def _asked(engine: Engine, plan: Plan) -> list[tuple[str, Spent]]:
    """What asking for losses cost."""
    return asked_of(engine, plan.asked, {task.client for task in plan.tasks}, 4 * len(plan.state.w))


def _judged(record: Record, engine: Engine, state: State, model: Tensor, last: bool = False) -> Record:
    """The record with the judgement of w and, where it differs, of the server average; `last`: due or not.

    Where judging a model costs messages, one is judged: the one that would be handed back.
    """
    once = getattr(engine, "judges_once", False)
    seen = engine.evaluate(model if once else state.w, record.t, last, state.carry)
    if seen is None:
        return record
    averaged = None if once or model is state.w else engine.evaluate(model, record.t, last, state.carry)
    return judged(record, seen, averaged)


def _end(recipe: Recipe, engine: Engine, state: State, record: Record) -> Round:
    """A round that changed nothing but the record; where it ends the run, the model so far is judged if it was not."""
    committed = [h for h in state.history if h.outcome == "committed"][-1:]
    if record.stop and committed and committed[0].headline is None:
        model = recipe.average.model(state.memory.get("average"), state.w)
        record = _judged(record, engine, state, model, last=True)
    after = replace(state, history=(*state.history, record), attempt=state.attempt + (record.outcome == "abandoned"))
    return Round(after, record, (), (), None)


def _reasons(rejected: dict[str, str]) -> str:
    return "; ".join(f"{client}: {why}" for client, why in sorted(rejected.items())[:3]) or "nobody is reachable"
