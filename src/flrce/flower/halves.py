"""A round in two halves, configure_train and aggregate_train: for Flower's own loop, and for subclasses."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from flrce import loop
from flrce.errors import BadInput
from flrce.flower.engine import configured
from flrce.flower.nodes import exchange
from flrce.flower.session import Session, figures, noted
from flrce.types import Round, State

HALVES = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


@dataclass
class Open:
    """The round that is under way."""

    session: Session
    state: State
    plan: loop.Plan | None = None
    messages: Sequence[Message] = ()
    since: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)  # message -> how long its answer took, where known
    done: Round | None = None
    arrays: ArrayRecord | None = None  # what the round made

    def send(self, config: ConfigRecord) -> Sequence[Message]:
        """The messages of the round that begins; none once the run was stopped."""
        session, engine, self.plan, self.messages, self.done = self.session, self.session.engine, None, (), None
        if loop.over(self.state):
            return []
        engine.w, engine.train_config, engine.metrics = self.state.w, dict(config), {}
        plan = loop.begin(session.sized(), engine, self.state, engine.options.seed, session.T)
        self.plan = noted(plan, engine)
        self.messages = [] if plan.refused else [engine.message(self.state.w, task) for task in self.plan.tasks]
        self.since = time.monotonic()
        return self.messages

    def sent(self, messages: Sequence[Message]) -> None:
        """Go by the messages that were really sent: a subclass may have left some out or written them anew."""
        assert self.plan is not None
        online = self.session.engine.online
        flights = {online[flight.task.client].node: flight for flight in self.plan.flights}
        odd = next((m.metadata.dst_node_id for m in messages if m.metadata.dst_node_id not in flights), None)
        if odd is not None:
            raise BadInput(f"configure_train has a message for node {odd}, which was not chosen; choose by a Selector")
        self.plan = replace(self.plan, flights=tuple(flights[m.metadata.dst_node_id] for m in messages))
        self.messages = messages

    def receive(self, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model that would be handed back now, and the round's figures."""
        plan, engine = self.plan, self.session.engine
        if plan is None:
            return None, None
        at = {message.metadata.message_id: i for i, message in enumerate(self.messages)}
        passed = time.monotonic() - self.since
        down, read = list(map(engine.sending, self.messages, plan.tasks)), []
        for reply in replies:
            i = at.get(reply.metadata.reply_to_message_id)
            if i is not None:
                seconds = self.seconds.get(self.messages[i].metadata.message_id, passed)
                read.append(engine.read(self.state.w, plan.tasks[i], down[i], reply, seconds))
        self.done = loop.finish(self.session.recipe, engine, plan, engine.in_scale(read), self.session.T)
        self.state = self.done.state
        model = self.state.w if self.done.model is None else self.done.model
        self.arrays = engine.arrays(model)
        metrics = dict(self.session.trained(self.done.record) or {})
        return self.arrays, MetricRecord({**metrics, **figures(self.done.record)})


def changed(strategy: Strategy, ours: type) -> list[str]:
    """The halves that a subclass has methods of its own for."""
    return [name for name in HALVES if getattr(type(strategy), name) is not getattr(ours, name)]


def by_halves(strategy: Strategy, opened: Open) -> Round:
    """One round through a subclass's own configure_train and aggregate_train."""
    engine, name, t = opened.session.engine, type(strategy).__name__, opened.state.t + 1
    config = ConfigRecord(dict(configured(opened.session.train_config, t)))
    messages = list(strategy.configure_train(t, engine.arrays(opened.state.w), config, engine.grid))
    if opened.plan is None:
        raise BadInput(f"{name}.configure_train must call super().configure_train(...), which chooses the clients")
    opened.sent(messages)
    found = exchange(engine.grid, messages, engine.options.timeout, lambda _, reply, seconds: (reply, seconds),
                     meanwhile=engine.meanwhile)  # fmt: skip
    opened.seconds = {messages[at].metadata.message_id: seconds for at, (_, seconds) in found.items()}
    arrays, metrics = strategy.aggregate_train(t, [found[at][0] for at in sorted(found)])
    if opened.done is None:
        raise BadInput(f"{name}.aggregate_train must call super().aggregate_train(server_round, replies)")
    if arrays is not None and not _same(arrays, opened.arrays):
        raise BadInput(f"{name}.aggregate_train returns another model than super()'s; use an Aggregator for that")
    engine.summed = metrics
    return opened.done


def _same(arrays: ArrayRecord, made: ArrayRecord | None) -> bool:
    return made is not None and (
        arrays is made or {n: a.data for n, a in arrays.items()} == {n: a.data for n, a in made.items()}
    )
