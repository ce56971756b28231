"""What our Flower strategies share: settings, and a `start` that can end early, keep state and resume."""

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from flrce import loop
from flrce.errors import BadInput
from flrce.fleet.costs import Profile, profile
from flrce.flower.arrays import Template
from flrce.flower.engine import FlowerEngine
from flrce.flower.options import Costs, Judge, Options
from flrce.flower.session import Result, Session, figures, fitted, kept, settings
from flrce.local.client import Workshop
from flrce.pieces import Full, Recipe, StopRule
from flrce.stops.budget import AnyOf, Budget
from flrce.types import Round, State

Config = Mapping[str, Any]
log = logging.getLogger("flwr")


@dataclass
class Open:
    """A round in two halves, for whoever calls configure_train and aggregate_train instead of `start`."""

    session: Session
    state: State
    plan: loop.Plan | None = None
    messages: list[Message] = field(default_factory=list)
    since: float = 0.0

    def send(self) -> list[Message]:
        """The messages of the round that begins; none once the run was stopped."""
        session, self.plan, self.messages = self.session, None, []
        if loop.over(self.state):
            return []
        session.engine.w = self.state.w
        plan = loop.begin(session.recipe, session.engine, self.state, session.engine.options.seed)
        self.plan = fitted(plan, session.engine)
        self.messages = [] if plan.refused else [session.engine.message(self.state.w, task) for task in self.plan.tasks]
        self.since = time.monotonic()
        return self.messages

    def receive(self, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model that would be handed back now, and the round's figures."""
        plan, engine = self.plan, self.session.engine
        if plan is None:
            return None, None
        at = {message.metadata.message_id: i for i, message in enumerate(self.messages)}
        seconds = time.monotonic() - self.since
        found = [(at.get(reply.metadata.reply_to_message_id), reply) for reply in replies]
        down = list(map(engine.sending, self.messages, plan.tasks))
        read = [engine.read(self.state.w, plan.tasks[i], down[i], r, seconds) for i, r in found if i is not None]
        done = loop.finish(self.session.recipe, engine, plan, read)
        self.state = done.state
        if done.record.stop:
            log.info("Stopping after round %d: %s", done.record.t, done.record.stop)
        model = self.state.w if done.model is None else done.model
        return engine.arrays(model), MetricRecord(figures(done.record))


class Ours(Strategy):
    """What our strategies share: settings, the session, and a `start` that can end early."""

    def __init__(
        self, *, state: Path | str | None = None, seed: int = 0, stop: StopRule | None = None,
        budget: Mapping[str, Any] | None = None, fraction_train: float = 1.0, fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2, min_evaluate_nodes: int = 2, min_available_nodes: int = 2,
        minimum_replies: int = 1, wait_for_nodes: float = 300.0, ask_names: bool = True, eval_every: int = 1,
        arrayrecord_key: str = "arrays", configrecord_key: str = "config", device: str | Profile | None = None,
        model: nn.Module | None = None, sample_shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """`state` is a folder that a killed run goes on from; `budget` caps rounds, bytes, joules or seconds; `device`
        is a profile that models the joules of clients that cannot measure theirs; `model` with `sample_shape` tells
        the server the network, which sub-models and freezing need. The rest is as in Flower's FedAvg."""
        if not 0 < fraction_train <= 1 or not 0 <= fraction_evaluate <= 1:
            raise BadInput(f"fraction_train {fraction_train} and fraction_evaluate {fraction_evaluate}: use 0 to 1")
        self.folder = Path(state) if state else None
        self.fraction_train, self.min_train_nodes = fraction_train, min_train_nodes
        self.extra = tuple(rule for rule in (stop, Budget(**budget) if budget else None) if rule)
        self.minimum, self.model, self.sample_shape = minimum_replies, model, sample_shape
        self.options = Options(
            seed=seed, wait=wait_for_nodes, available=max(min_available_nodes, min_train_nodes), ask=ask_names,
            fraction_evaluate=fraction_evaluate, least_evaluate=min_evaluate_nodes, eval_every=eval_every,
            arrays_key=arrayrecord_key, config_key=configrecord_key,
            profile=profile(device) if isinstance(device, str) else device,
        )  # fmt: skip
        self.experiment = ""  # TOML kept in the state folder instead of the strategy's own settings
        self.partition: Mapping[str, Any] | None = None  # who holds which samples, where the server knows
        self.costs: Costs | None = None  # a model of the fleet, where it is only simulated
        self.watch: Callable[[Round], None] | None = None  # is shown every round
        self._open: Open | None = None

    @abstractmethod
    def recipe_for(self, engine: FlowerEngine, P: int) -> Recipe:
        """The method, where P clients train in a round unless it says otherwise."""

    def engine_for(self, *args: Any, **kwargs: Any) -> FlowerEngine:
        return FlowerEngine(*args, **kwargs)

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: ConfigRecord | None = None, evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Judge | None = None,
    ) -> Result:  # fmt: skip
        """All rounds, until the last or until a stop rule has had enough: then no further message is sent."""
        session = self._session(
            grid, initial_arrays, num_rounds, timeout, train_config or {}, evaluate_config or {}, evaluate_fn
        )
        self.summary()
        first = evaluate_fn(0, initial_arrays) if evaluate_fn else None
        result = session.run()
        if first is not None:
            result.evaluate_metrics_serverapp[0] = first
        return result

    def _session(
        self, grid: Grid, arrays: ArrayRecord, T: int, timeout: float, train: Config, evaluate: Config,
        judge: Judge | None,
    ) -> Session:  # fmt: skip
        shop = self._shop()
        template = Template.of(arrays, shop.layout if shop else None)
        options = replace(self.options, timeout=timeout)
        engine = self.engine_for(grid, template, options, shop, train, evaluate, judge, self.costs)
        P = kept(self.folder, "per_round") or max(
            int(self.fraction_train * len(engine.clients())), self.min_train_nodes
        )
        recipe = self.recipe_for(engine, P)
        if self.extra:
            recipe = replace(recipe, stop=AnyOf((recipe.stop, *self.extra)))
        if self.minimum > recipe.minimum:
            recipe = replace(recipe, minimum=self.minimum)
        if shop is None and not isinstance(recipe.submodel, Full):
            raise BadInput(f"recipe {recipe.name} uses sub-models: pass model= and sample_shape= to the strategy")
        written = self.experiment or settings(recipe, T, self.options.seed)
        return Session(recipe, engine, template.pack(arrays), T, self.folder, written, self.partition, self.watch)

    def _shop(self) -> Workshop | None:
        if self.model is None:
            return None
        if self.sample_shape is None:
            raise BadInput("model= needs sample_shape=, such as (1, 28, 28)")
        nothing = torch.zeros(0, *self.sample_shape)
        return Workshop(self.model, self.sample_shape, nothing, torch.zeros(0, dtype=torch.long), 1.0, 0.0)

    def summary(self) -> None:
        """Log what the strategy is set to."""
        log.info("%s: fraction_train %g, seed %d, state %s", type(self).__name__, self.fraction_train,
                      self.options.seed, self.folder or "not kept")  # fmt: skip

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One round's messages, for a loop other than `start`; only `start` can stop early, keep state and resume."""
        if self._open is None:
            session = self._session(grid, arrays, server_round, 3600, config, {}, None)
            self._open = Open(session, loop.initial(session.recipe, session.engine, session.w))
        return self._open.send()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._open.receive(replies) if self._open else (None, None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the clients are asked for their judgement as soon as there is a model to judge."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._open.session.engine.judged[0] if self._open else None
