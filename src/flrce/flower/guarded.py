"""Any of Flower's own strategies as a recipe: it chooses and sums; our gate, books and checkpoints
do the rest.
"""

import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp.strategy import Strategy
from numpy.random import Generator
from safetensors.torch import load, save
from torch import Tensor

from flrce.core.pieces import NoCompression, Recipe
from flrce.core.roles import Aggregator, RoundView, Selector, StopRule
from flrce.core.types import (
    ClientCost,
    Evaluation,
    PendingTask,
    Portion,
    Reply,
    RoundEvent,
    RoundRecord,
    RoundReplies,
    Selection,
    Task,
    Updates,
)
from flrce.errors import BadInput, format_one_line
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.engine import FlowerEngine
from flrce.flower.evaluation import Evaluator, MetricsAndEvaluation
from flrce.flower.hooks import list_overridden_hooks
from flrce.flower.messages import SentTask
from flrce.flower.metrics import (
    ACCURACY_KEYS,
    find_accuracy_scale,
    find_metric,
    get_reply_metrics,
    read_valid_metrics,
    select_consistent,
)
from flrce.flower.nodes import ConnectedClient
from flrce.flower.options import resolve_config
from flrce.flower.strategy import FlrceStrategy
from flrce.methods.client.workload import PlainTraining
from flrce.rng import make_stream

log = logging.getLogger("flwr")


class Guarded(FlrceStrategy):
    """Any of Flower's own strategies behind our gate, with books, stop rules, budgets, checkpoints
    and resume.

    Strategies whose arrays change shape from round to round (XGBoost's) cannot be guarded.
    """

    def __init__(
        self, strategy: Strategy, *, state: Path | str | None = None, seed: int = 0, **settings: Any
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise BadInput(
                f"Guarded({format_one_line(strategy, 40)}): use a strategy of"
                " flwr.serverapp.strategy; see docs/flower.md#from-the-older-interface"
            )
        inner = getattr(strategy, "strategy", strategy)
        same = (
            "fraction_train",
            "min_train_nodes",
            "weighted_by_key",
            "arrayrecord_key",
            "configrecord_key",
        )
        taken = {name: getattr(inner, name) for name in same if hasattr(inner, name)}
        self.refuse_unknown(settings)
        super().__init__(state=state, seed=seed, **{**taken, "min_available_nodes": 1, **settings})
        self.strategy, self.by_fraction = strategy, False
        self._stops = tuple(EveryRound(rule) for rule in self._stops)

    def build_engine(self, *args: Any, **kwargs: Any) -> FlowerEngine:
        own = list_overridden_hooks(self, FlrceStrategy)
        if own:
            raise BadInput(
                f"{type(self).__name__} overrides {own[0]}: override it in the strategy that is"
                " guarded"
            )
        return GuardedEngine(self.strategy, *args, **kwargs)

    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        assert isinstance(engine, GuardedEngine)
        return build_guarded_recipe(engine, P)

    def summary(self) -> None:
        super().summary()
        self.strategy.summary()


class TooFewNodes(TimeoutError):
    """A strategy went on asking for more nodes than there are."""


class SelectionGrid:
    """The grid as a strategy sees it while it chooses: nodes in the order of their names, and no
    waiting for ever.
    """

    def __init__(self, engine: "GuardedEngine") -> None:
        self.engine, self.end = engine, time.monotonic() + engine.options.wait

    def get_node_ids(self) -> list[int]:
        if time.monotonic() > self.end:
            raise TooFewNodes(
                f"fewer nodes than the strategy wants after {self.engine.options.wait:g} s"
            )
        return [client.node for client in self.engine.refresh_connected().values()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine.grid, name)


class GuardedEngine(FlowerEngine):
    """Sends what the strategy wants sent; keeps the replies for it to sum."""

    def __init__(self, strategy: Strategy, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strategy, self.evaluator = strategy, WrappedEvaluator(self, self.evaluator)
        self.outgoing: dict[str, Message] = {}
        self.incoming: dict[str, Message] = {}
        self.rows: dict[int, str] = {}
        self.t = self.made = 0  # this round, models made so far

    def choose_clients(self, view: RoundView) -> tuple[int, ...]:
        """The strategy's choice as rows; its draws are ours, so that a resumed run draws the
        same.
        """
        self.t, self.outgoing, self.incoming = view.t, {}, {}
        self.rows = {k: view.draft(k).client for k in view.pool}
        assert view.w is not None
        config = resolve_config(self.train_config, view.t)
        messages = self.configure_with_seed(
            "select", view.t, self.get_model_arrays(view.w), config, self.strategy.configure_train
        )
        names = {client.node: client.name for client in self.online.values()}
        self.outgoing = {
            names[m.metadata.dst_node_id]: m for m in messages if m.metadata.dst_node_id in names
        }
        return tuple(k for k, client in self.rows.items() if client in self.outgoing)

    def adapt_task(self, task: Task) -> Task:
        return replace(task, compressor=NoCompression(), part=Portion(), download=None)

    def build_message(self, pending: PendingTask) -> Message:
        return self.outgoing[pending.task.client]

    def refresh_connected(self) -> dict[str, ConnectedClient]:
        """Who is here now, without waiting for more."""
        self.online = self.nodes.get_connected_clients()
        return self.online

    def parse_reply(self, sent: SentTask, reply: Message, seconds: float) -> Reply:
        self.incoming[sent.task.client] = reply
        return super().parse_reply(sent, reply, seconds)

    def collect(
        self, pending: Sequence[PendingTask], size: int | None, open_ended: bool
    ) -> RoundReplies:
        """As always; and a reply whose metrics are not like the others', which Flower would end the
        run for, is out.
        """
        came = super().collect(pending, size, open_ended)
        keys = {client: tuple(sorted(metrics)) for client, metrics in self.reports.metrics.items()}
        usual = min(
            Counter(keys.values()).most_common(),
            key=lambda pair: (-pair[1], pair[0]),
            default=((), 0),
        )[0]
        replies = [
            reply
            if reply.error or keys.get(reply.client) == usual
            else replace(
                reply, payload=None, error="malformed: metrics unlike those of the other clients"
            )
            for reply in came.replies
        ]
        return replace(came, replies=replies)

    def aggregate_updates(self, w: Tensor, updates: Updates) -> Tensor:
        """The strategy's new model from the replies that passed; w where it makes none, or none
        that is finite.
        """
        replies = [self.incoming[self.rows[k]] for k in updates.k.tolist()]
        try:
            arrays, self.reports.summed = self.strategy.aggregate_train(self.t, replies)
            made = None if arrays is None else flatten_arrays(self.template, arrays)
        except Exception as why:  # a strategy's own: too few replies for Krum, for instance
            log.warning(
                "%s made no model in round %d: %s", type(self.strategy).__name__, self.t, why
            )
            return w
        if made is None or not torch.isfinite(made).all():
            log.warning(
                "%s made no finite model in round %d; the last one stays",
                type(self.strategy).__name__,
                self.t,
            )
            return w
        self.made += 1
        return made

    def made_model(self, initial: Tensor, w: Tensor, history: Sequence[RoundRecord]) -> bool:
        """Whether the strategy made any model, now or before the run was resumed."""
        return super().made_model(initial, w, history) and (
            self.made > 0 or not torch.equal(initial, w)
        )

    def configure_with_seed(
        self, purpose: str, t: int, arrays: ArrayRecord, config: Mapping[str, Any], make: Any
    ) -> list[Message]:
        before = random.getstate()
        random.seed(int(make_stream(self.options.seed, purpose, t).integers(2**63)))
        try:
            return list(make(t, arrays, ConfigRecord(dict(config)), SelectionGrid(self)))
        except TooFewNodes as why:
            log.warning("round %d: %s", t, why)
            return []
        finally:
            random.setstate(before)


class WrappedEvaluator(Evaluator):
    """Evaluation is the strategy's too: its messages, its sums."""

    def __init__(self, engine: GuardedEngine, ours: Evaluator) -> None:
        super().__init__(ours.grid, ours.template, ours.options, ours.free)
        self.engine = engine

    def query_clients(self, arrays: ArrayRecord, t: int) -> MetricsAndEvaluation:
        strategy = self.engine.strategy
        messages = self.engine.configure_with_seed(
            "evaluate", t, arrays, self.build_config(t), strategy.configure_evaluate
        )
        messages, came = self.ask_judges(messages)
        scale = find_accuracy_scale(list(map(get_reply_metrics, came)))
        key = self.options.weight_key
        sane = [
            reply
            for reply in came
            if read_valid_metrics(reply, scale, key) and len(reply.content.metric_records) == 1
        ]
        good = [sane[i] for i in select_consistent(list(map(get_reply_metrics, sane)))]
        self._store_client_metrics(good, scale)
        try:
            metrics = strategy.aggregate_evaluate(t, good) if good else None
        except Exception as why:
            log.warning(
                "%s could not sum evaluations of round %d: %s", type(strategy).__name__, t, why
            )
            return None, None
        accuracy = find_metric(metrics or {}, ACCURACY_KEYS, scale)
        down = self.template.nbytes * len(messages)
        return metrics, None if accuracy is None else Evaluation(
            accuracy / scale, accuracy / scale, 0.0, down
        )


@dataclass(frozen=True)
class StrategyState:
    """A strategy's own state (momenta, clipping norms), as bytes."""

    blob: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.uint8))


@dataclass(frozen=True)
class WrappedSelector(Selector):
    """Who trains: the strategy says. Its state is this piece's memory, so that it is checkpointed
    and restored.
    """

    engine: GuardedEngine

    def initial_state(self, M: int, d: int, D: int) -> StrategyState:
        return StrategyState(serialize_strategy(self.engine.strategy))

    def select(self, state: StrategyState, view: RoundView, rng: Generator) -> Selection:
        restore_strategy(self.engine.strategy, state.blob)
        return Selection(self.engine.choose_clients(view))

    def observe(self, state: StrategyState, event: RoundEvent) -> StrategyState:
        return StrategyState(serialize_strategy(self.engine.strategy))


@dataclass(frozen=True)
class WrappedAggregator(Aggregator):
    """What replies become: the strategy says."""

    engine: GuardedEngine

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        return self.engine.aggregate_updates(w, updates)


@dataclass(frozen=True)
class EveryRound(StopRule):
    """A stop rule for runs without exploit rounds: each round counts as one."""

    rule: StopRule

    def __call__(self, history: Sequence[RoundRecord]) -> str:
        return self.rule(_count_as_exploit(history))

    def check_next_round(
        self, history: Sequence[RoundRecord], estimates: Sequence[ClientCost]
    ) -> str:
        return self.rule.check_next_round(history, estimates)

    def check_recipe(self, recipe: Recipe) -> str:
        return self.rule.check_recipe(recipe)

    def list_rules(self) -> tuple[StopRule, ...]:
        return self.rule.list_rules()

    @property
    def checks_costs(self) -> bool:
        return self.rule.checks_costs


def _count_as_exploit(history: Sequence[RoundRecord]) -> list[RoundRecord]:
    return [replace(record, exploit=True) for record in history]


def build_guarded_recipe(engine: GuardedEngine, P: int) -> Recipe:
    """The strategy as a recipe."""
    name = f"guarded-{type(engine.strategy).__name__.lower()}"
    return Recipe(P, WrappedSelector(engine), PlainTraining(), WrappedAggregator(engine), name=name)


def flatten_arrays(template: ArrayTemplate, arrays: ArrayRecord) -> Tensor:
    """w of a record that our own server's strategy made, whatever its dtypes."""
    parts = [np.asarray(arrays[s.name].numpy()).reshape(s.shape) for s in template.layout.slots]
    return torch.cat([torch.from_numpy(part.reshape(-1)).to(template.dtype) for part in parts])


def serialize_strategy(strategy: Strategy) -> Tensor:
    """A strategy's numbers and arrays as bytes; whatever is neither, such as functions, stays
    out.
    """
    arrays: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for name, owner, key in _iter_attributes(strategy):
        value = getattr(owner, key)
        if value is None or isinstance(value, bool | int | float | str):
            plain[name] = value
            continue
        kind, parts = _extract_arrays(value)
        if kind:
            plain[name] = [kind, *parts]
            arrays |= {
                f"{name}/{i}": torch.from_numpy(np.array(x, order="C"))
                for i, x in enumerate(parts.values())
            }
    header = json.dumps(plain).encode()
    return torch.frombuffer(
        bytearray(len(header).to_bytes(8, "little") + header + save(arrays)), dtype=torch.uint8
    )


def restore_strategy(strategy: Strategy, blob: Tensor) -> None:
    """Give a strategy back what `serialize_strategy` took down."""
    data = blob.numpy().tobytes()
    size = int.from_bytes(data[:8], "little")
    plain, arrays = json.loads(data[8 : 8 + size]), load(data[8 + size :])
    for name, owner, key in list(_iter_attributes(strategy)):
        if name not in plain:
            continue
        value = plain[name]
        if isinstance(value, list):
            kind, *keys = value
            value = _rebuild_value(
                kind, {k: arrays[f"{name}/{i}"].numpy() for i, k in enumerate(keys)}
            )
        setattr(owner, key, value)


def _extract_arrays(value: Any) -> tuple[str, dict[str, Any]]:
    """("array" | "list" | "dict" | "record", its arrays by name), or "" for anything else."""
    if isinstance(value, np.ndarray):
        kind, parts = "array", {"": value}
    elif isinstance(value, ArrayRecord):
        kind, parts = "record", {name: array.numpy() for name, array in value.items()}
    elif isinstance(value, dict):
        kind, parts = "dict", value
    elif isinstance(value, list):
        kind, parts = "list", {str(i): x for i, x in enumerate(value)}
    else:
        return "", {}
    fine = all(
        isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "fiub" for x in parts.values()
    )
    return (kind, parts) if fine and all(isinstance(name, str) for name in parts) else ("", {})


def _rebuild_value(kind: str, found: dict[str, Any]) -> Any:
    if kind == "array":
        return found[""]
    if kind == "list":
        return list(found.values())
    return found if kind == "dict" else ArrayRecord({name: Array(x) for name, x in found.items()})


def _iter_attributes(strategy: Any, prefix: str = "") -> Iterable[tuple[str, Any, str]]:
    """(path, object, attribute) of a strategy and of those it wraps."""
    for key, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _iter_attributes(value, f"{prefix}{key}.")
        else:
            yield prefix + key, strategy, key
