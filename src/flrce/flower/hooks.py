"""A round in two halves, configure_train and aggregate_train: for Flower's own loop, and for
subclasses.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from flrce.core import loop
from flrce.core.types import Reply, Round, RoundPlan, RoundReplies, State
from flrce.errors import BadInput, UnfinishedRun
from flrce.flower.messages import MessageQueue
from flrce.flower.options import resolve_config
from flrce.flower.session import Session, to_flower_metrics

HOOK_NAMES = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


@dataclass
class OpenRound:
    """The round that is under way."""

    session: Session
    state: State
    plan: RoundPlan | None = None
    messages: Sequence[Message] = ()
    since: float = 0.0
    # message -> how long its answer took, where known
    seconds: Mapping[str, float] = field(default_factory=dict)
    done: Round | None = None
    arrays: ArrayRecord | None = None  # what the round made

    def prepare_messages(self, config: ConfigRecord) -> Sequence[Message]:
        """The messages of the round that begins; none once the run was stopped."""
        session, engine = self.session, self.session.engine
        self.plan, self.messages, self.done = None, (), None
        if loop.is_stopped(self.state):
            return []
        recipe = session.resize_recipe()
        if recipe.pace.buffer_size is not None:
            raise BadInput(
                f"{type(recipe.pace).__name__} leaves tasks under way between rounds, which two"
                " halves of a round cannot: use start, without a configure_train of your own"
            )
        engine.begin_external_round(config)
        self.plan = loop.plan_round(recipe, engine, self.state, engine.options.seed, session.T)
        pending = () if self.plan.refused else self.plan.pending
        self.messages = [engine.build_message(one) for one in pending]
        self.since = time.monotonic()
        return self.messages

    def use_sent_messages(self, messages: Sequence[Message]) -> None:
        """Go by the messages that were really sent: a subclass may have left some out or written
        them anew.
        """
        assert self.plan is not None
        online = self.session.engine.online
        pending = {online[one.task.client].node: one for one in self.plan.pending}
        odd = next(
            (m.metadata.dst_node_id for m in messages if m.metadata.dst_node_id not in pending),
            None,
        )
        if odd is not None:
            raise BadInput(
                f"configure_train has a message for node {odd}, which was not chosen; choose by a"
                " Selector"
            )
        self.plan = replace(
            self.plan, pending=tuple(pending[m.metadata.dst_node_id] for m in messages)
        )
        self.messages = messages

    def aggregate_replies(
        self, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The final model if the run ended now, None where the round made none, and the round's
        figures.
        """
        session, engine = self.session, self.session.engine
        if self.plan is None:
            return None, None
        read = engine.validate_reply_metrics(self._parse_replies(self.plan, replies))
        self.done = loop.close_round(
            session.recipe, engine, self.plan, RoundReplies(read), session.T
        )
        self.state, record, self.arrays = self.done.state, self.done.record, None
        # in our own loop the session logs it, once the round is on disk
        if (
            record.stop
            and session.run_hooked_round is None
            and not engine.made_model(session.w, self.state.w, self.state.history)
        ):
            raise UnfinishedRun(
                f"no round was completed, the model is still the initial one: {record.stop}"
            )
        if record.outcome == "committed":
            self.arrays = engine.get_model_arrays(
                self.state.w if self.done.model is None else self.done.model
            )
        metrics = dict(engine.reports.aggregate_training_metrics(record) or {})
        return self.arrays, MetricRecord({**metrics, **to_flower_metrics(record)})

    def _parse_replies(self, plan: RoundPlan, replies: Iterable[Message]) -> list[Reply]:
        """The answers to this round's messages; others are left out."""
        engine, passed = self.session.engine, time.monotonic() - self.since
        pairs = zip(self.messages, plan.pending, strict=True)
        sent = {message.metadata.message_id: (message, one) for message, one in pairs}
        parsed = []
        for reply in replies:
            key = reply.metadata.reply_to_message_id
            if key in sent:
                message, one = sent[key]
                task = engine.make_sent_task(message, one.task, one.w)
                parsed.append(engine.parse_reply(task, reply, self.seconds.get(key, passed)))
        return parsed


def list_overridden_hooks(strategy: Strategy, ours: type) -> list[str]:
    """The halves that a subclass has methods of its own for."""
    return [name for name in HOOK_NAMES if getattr(type(strategy), name) is not getattr(ours, name)]


def run_hooked_round(strategy: Strategy, opened: OpenRound) -> Round:
    """One round through a subclass's own configure_train and aggregate_train."""
    engine, name, t = opened.session.engine, type(strategy).__name__, opened.state.t + 1
    config = ConfigRecord(dict(resolve_config(engine.options.train_config, t)))
    messages = list(
        strategy.configure_train(t, engine.get_model_arrays(opened.state.w), config, engine.grid)
    )
    if opened.plan is None:
        raise BadInput(
            f"{name}.configure_train must call super().configure_train(...), which chooses the"
            " clients"
        )
    opened.use_sent_messages(messages)
    queue = MessageQueue(engine.grid)
    ids = queue.send(messages)
    answers = {
        key: (reply, took)
        for key, reply, took in queue.iter_answers(ids, time.monotonic() + engine.options.timeout)
    }
    opened.seconds = {key: took for key, (_, took) in answers.items()}
    arrays, metrics = strategy.aggregate_train(
        t, [answers[key][0] for key in ids if key in answers]
    )
    if opened.done is None:
        raise BadInput(
            f"{name}.aggregate_train must call super().aggregate_train(server_round, replies)"
        )
    if arrays is not None and not _has_same_arrays(arrays, opened.arrays):
        raise BadInput(
            f"{name}.aggregate_train returns another model than super()'s; use an Aggregator for"
            " that"
        )
    engine.reports.summed = metrics  # as the strategy made one of them
    return opened.done


def _has_same_arrays(arrays: ArrayRecord, made: ArrayRecord | None) -> bool:
    return made is not None and (
        arrays is made
        or {n: a.data for n, a in arrays.items()} == {n: a.data for n, a in made.items()}
    )
