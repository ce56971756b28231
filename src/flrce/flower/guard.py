"""Any of Flower's own strategies as a recipe: it chooses and sums; our gate, books and checkpoints do the rest."""

import logging
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import Strategy
from numpy.random import Generator
from torch import Tensor

from flrce.flower.arrays import Template
from flrce.flower.engine import FlowerEngine
from flrce.flower.figures import ACCURACY, first, metrics_of, reported, scale, select_consistent
from flrce.flower.frozen import freeze, thaw
from flrce.flower.judging import Panel, Seen
from flrce.flower.nodes import Client
from flrce.flower.options import configured
from flrce.flower.under_way import Sent
from flrce.local.workload import Alike
from flrce.pieces import Dense, Recipe, StopRule, View
from flrce.rng import stream
from flrce.traits import Refuses
from flrce.types import (
    Arrivals,
    Evaluation,
    Event,
    Flight,
    Portion,
    Record,
    Reply,
    Selection,
    Spent,
    Task,
    Updates,
)

log = logging.getLogger("flwr")


class NotEnough(TimeoutError):
    """A strategy went on asking for more nodes than there are."""


class Roll:
    """The grid as a strategy sees it while it chooses: nodes in the order of their names, and no waiting for ever."""

    def __init__(self, engine: "GuardedEngine") -> None:
        self.engine, self.end = engine, time.monotonic() + engine.options.wait

    def get_node_ids(self) -> list[int]:
        if time.monotonic() > self.end:
            raise NotEnough(f"fewer nodes than the strategy wants after {self.engine.options.wait:g} s")
        return [client.node for client in self.engine.connected().values()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine.grid, name)


class GuardedEngine(FlowerEngine):
    """Sends what the strategy wants sent; keeps the replies for it to sum."""

    def __init__(self, strategy: Strategy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strategy, self.panel = strategy, TheirPanel(self, self.panel)
        self.outgoing: dict[str, Message] = {}
        self.incoming: dict[str, Message] = {}
        self.rows: dict[int, str] = {}
        self.t = self.made = 0  # this round, models made so far

    def choose(self, view: View) -> tuple[int, ...]:
        """The strategy's choice as rows; its draws are ours, so that a resumed run draws the same."""
        self.t, self.outgoing, self.incoming = view.t, {}, {}
        self.rows = {k: view.draft(k).client for k in view.pool}
        assert view.w is not None
        config = configured(self.train_config, view.t)
        messages = self.drawn("select", view.t, self.arrays(view.w), config, self.strategy.configure_train)
        names = {client.node: client.name for client in self.online.values()}
        self.outgoing = {names[m.metadata.dst_node_id]: m for m in messages if m.metadata.dst_node_id in names}
        return tuple(k for k, client in self.rows.items() if client in self.outgoing)

    def accept(self, task: Task) -> Task:
        return replace(task, compressor=Dense(), part=Portion())

    def message(self, w: Tensor, task: Task) -> Message:
        return self.outgoing[task.client]

    def connected(self) -> dict[str, Client]:
        """Who is here now, without waiting for more."""
        self.online = self.nodes.connected()
        return self.online

    def read(self, sent: Sent, reply: Message, seconds: float) -> Reply:
        self.incoming[sent.task.client] = reply
        return super().read(sent, reply, seconds)

    def collect(self, flights: Sequence[Flight], size: int | None, open_ended: bool) -> Arrivals:
        """As always; and a reply whose metrics are not like the others', which Flower would end the run for, is out."""
        came = super().collect(flights, size, open_ended)
        keys = {client: tuple(sorted(metrics)) for client, metrics in self.claims.metrics.items()}
        usual = min(Counter(keys.values()).most_common(), key=lambda pair: (-pair[1], pair[0]), default=((), 0))[0]
        replies = [
            reply if reply.error or keys.get(reply.client) == usual
            else replace(reply, payload=None, error="malformed: metrics unlike those of the other clients")
            for reply in came.replies
        ]  # fmt: skip
        return replace(came, replies=replies)

    def total(self, w: Tensor, updates: Updates) -> Tensor:
        """The strategy's new model from the replies that passed; w where it makes none, or none that is finite."""
        replies = [self.incoming[self.rows[k]] for k in updates.k.tolist()]
        try:
            arrays, self.claims.summed = self.strategy.aggregate_train(self.t, replies)
            made = None if arrays is None else flatten(self.template, arrays)
        except Exception as why:  # a strategy's own: too few replies for Krum, for instance
            log.warning("%s made no model in round %d: %s", type(self.strategy).__name__, self.t, why)
            return w
        if made is None or not torch.isfinite(made).all():
            log.warning("%s made no finite model in round %d; the last one stays", type(self.strategy).__name__, self.t)
            return w
        self.made += 1
        return made

    def made_model(self, initial: Tensor, w: Tensor, history: Sequence[Record]) -> bool:
        """Whether the strategy made any model, now or before the run was resumed."""
        return super().made_model(initial, w, history) and (self.made > 0 or not torch.equal(initial, w))

    def drawn(self, purpose: str, t: int, arrays: ArrayRecord, config: Mapping[str, Any], make: Any) -> list[Message]:
        before = random.getstate()
        random.seed(int(stream(self.options.seed, purpose, t).integers(2**63)))
        try:
            return list(make(t, arrays, ConfigRecord(dict(config)), Roll(self)))
        except NotEnough as why:
            log.warning("round %d: %s", t, why)
            return []
        finally:
            random.setstate(before)


class TheirPanel(Panel):
    """Evaluation is the strategy's too: its messages, its sums."""

    def __init__(self, engine: GuardedEngine, ours: Panel) -> None:
        super().__init__(ours.grid, ours.template, ours.options, ours.config, ours.own, ours.free)
        self.engine = engine

    def ask(self, arrays: ArrayRecord, t: int) -> Seen:
        strategy = self.engine.strategy
        messages = self.engine.drawn("evaluate", t, arrays, self.asks(t), strategy.configure_evaluate)
        messages = self.inquiries.select_askable(messages)
        came = list(self.inquiries.ask(messages).values())
        most = scale(list(map(metrics_of, came)))
        key = self.options.weight_key
        sane = [reply for reply in came if reported(reply, most, key) and len(reply.content.metric_records) == 1]
        good = [sane[i] for i in select_consistent(list(map(metrics_of, sane)))]
        self._note(good, [True] * len(good), most)
        try:
            metrics = strategy.aggregate_evaluate(t, good) if good else None
        except Exception as why:
            log.warning("%s could not sum evaluations of round %d: %s", type(strategy).__name__, t, why)
            return None, None
        accuracy = first(metrics or {}, ACCURACY, most)
        down = self.template.nbytes * len(messages)
        return metrics, None if accuracy is None else Evaluation(accuracy / most, accuracy / most, 0.0, down)


@dataclass(frozen=True)
class Kept:
    """A strategy's own state (momenta, clipping norms), as bytes."""

    blob: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))


@dataclass(frozen=True)
class Theirs:
    """Who trains: the strategy says. Its state is this piece's memory, so that it is checkpointed and restored."""

    engine: GuardedEngine

    def init(self, M: int, d: int, D: int) -> Kept:
        return Kept(freeze(self.engine.strategy))

    def select(self, memory: Kept, view: View, rng: Generator) -> Selection:
        thaw(self.engine.strategy, memory.blob)
        return Selection(self.engine.choose(view))

    def observe(self, memory: Kept, event: Event) -> Kept:
        return Kept(freeze(self.engine.strategy))


@dataclass(frozen=True)
class TheirSum:
    """What replies become: the strategy says."""

    engine: GuardedEngine

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor:
        return self.engine.total(w, updates)


@dataclass(frozen=True)
class EveryRound:
    """A stop rule for runs without exploit rounds: each round counts as one."""

    rule: StopRule

    def __call__(self, history: Sequence[Record]) -> str:
        return self.rule([replace(record, exploit=True) for record in history])

    def before(self, history: Sequence[Record], estimates: Sequence[Spent]) -> str:
        return self.rule.before(history, estimates) if isinstance(self.rule, Refuses) else ""


def recipe(engine: GuardedEngine, P: int) -> Recipe:
    """The strategy as a recipe."""
    name = f"guarded-{type(engine.strategy).__name__.lower()}"
    return Recipe(P, Theirs(engine), Alike(), TheirSum(engine), name=name)


def flatten(template: Template, arrays: ArrayRecord) -> Tensor:
    """w of a record that our own server's strategy made, whatever its dtypes."""
    parts = [np.asarray(arrays[s.name].numpy()).reshape(s.shape) for s in template.layout.slots]
    return torch.cat([torch.from_numpy(part.reshape(-1)).to(template.dtype) for part in parts])
