"""FLrce and any recipe under Flower's own interface: a `start` that can end early, keep state and
resume.
"""

import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from flrce.core import loop
from flrce.core.payloads import fingerprint_model
from flrce.core.pieces import FullModel, Recipe
from flrce.core.roles import Compressor, StopRule
from flrce.core.types import Round, State
from flrce.devices.costs import DeviceProfile, load_profile
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.flower.arrays import ArrayTemplate
from flrce.flower.engine import FlowerEngine
from flrce.flower.folder import format_settings, read_setting
from flrce.flower.hooks import OpenRound, list_overridden_hooks, run_hooked_round
from flrce.flower.metrics import parse_class_names
from flrce.flower.options import (
    EvaluateFunction,
    FlowerOptions,
    MetricsAggregation,
    RoundConfig,
    ServerContext,
    refuse_unknown_arguments,
    require_count,
    use_json_log_if_asked,
    warn_about_version,
)
from flrce.flower.session import Result, Session
from flrce.flower.wire import SAMPLES_KEY
from flrce.methods.catalogue import recipes
from flrce.methods.catalogue.families import CONTRIBUTED_METHODS, FORMER_NAMES, suggest_replacement
from flrce.methods.stopping.budget import AnyOf, CostBudget
from flrce.training.batches import Samples
from flrce.training.client import ClientRunner

NO_SETTINGS = ("self", "fedavg", "settings")  # parameters that are not settings
ANY_P = 10_000  # stands for a number of clients that is not known yet
log = logging.getLogger("flwr")


class FlrceStrategy(Strategy):
    """What our strategies share: settings, the session, and a `start` that can end early."""

    @classmethod
    def refuse_unknown(cls, given: Mapping[str, Any]) -> None:
        """BadInput for settings that no strategy of ours has."""
        shared = inspect.signature(FlrceStrategy.__init__).parameters
        own = inspect.signature(cls.__init__).parameters
        refuse_unknown_arguments(
            cls.__name__, given, [name for name in {**own, **shared} if name not in NO_SETTINGS]
        )

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = SAMPLES_KEY,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregation | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregation | None = None,
        *,
        state: Path | str | None = None,
        seed: int = 0,
        stop: StopRule | None = None,
        budget: Mapping[str, Any] | None = None,
        minimum_replies: int = 1,
        wait_for_nodes: float = 300.0,
        ask_names: bool | str = True,
        eval_every: int = 1,
        device: str | DeviceProfile | None = None,
        by_class: bool | Sequence[str] = False,
        model: nn.Module | None = None,
        sample_shape: tuple[int, ...] | None = None,
    ) -> None:
        """The first ten as in Flower's FedAvg. `state` is a folder that a killed run goes on from;
        `budget` caps rounds, bytes, joules or seconds; `device` is a profile that models the joules
        of clients that cannot measure theirs; `by_class`, True or the classes' names, has clients
        tell their label counts; `model` with `sample_shape` tells the server the network, which
        sub-models and freezing need.
        """
        for name, share in {"train": fraction_train, "evaluate": fraction_evaluate}.items():
            if not 0 <= share <= 1:
                raise BadInput(f"fraction_{name} = {share!r}: use 0 to 1")
        for name, count in {"minimum_replies": minimum_replies, "eval_every": eval_every}.items():
            require_count(name, count, least=1)
        nodes = {"min_train_nodes": min_train_nodes, "min_evaluate_nodes": min_evaluate_nodes}
        for name, count in {**nodes, "min_available_nodes": min_available_nodes}.items():
            require_count(name, count)
        if not wait_for_nodes >= 0:
            raise BadInput(f"wait_for_nodes = {wait_for_nodes!r}: use seconds, 0 or more")
        min_train_nodes = min_train_nodes if fraction_train else 0  # nobody trains
        self.folder = Path(state) if state else None
        self.fraction_train, self.min_train_nodes = fraction_train, min_train_nodes
        self._stops = list_stop_rules(stop, budget)
        self._least, self.model, self.sample_shape = minimum_replies, model, sample_shape
        self.options = FlowerOptions(
            seed=seed,
            wait=wait_for_nodes,
            available=max(min_available_nodes, min_train_nodes),
            ask=ask_names,
            least_train=min_train_nodes,
            fraction_evaluate=fraction_evaluate,
            least_evaluate=min_evaluate_nodes,
            eval_every=eval_every,
            by_class=bool(by_class),
            classes=parse_class_names(by_class),
            arrays_key=arrayrecord_key,
            config_key=configrecord_key,
            weight_key=weighted_by_key,
            train_sum=train_metrics_aggr_fn,
            evaluate_sum=evaluate_metrics_aggr_fn,
            profile=load_profile(device) if isinstance(device, str) else device,
        )
        self.by_fraction = True  # P follows the number of connected clients
        self._known = ServerContext()
        self.kept: tuple[str, ...] = ()  # patterns of parameters that stay with their client
        self._open: OpenRound | None = None
        self._engine: FlowerEngine | None = None

    def set_server_context(self, known: ServerContext) -> None:
        """What the server knows of the fleet. Kept apart: a subclass may have `costs` or a
        `partition` of its own.
        """
        self._known = known

    @abstractmethod
    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        """The method, where P clients train in a round unless it says otherwise."""

    def draft_recipe(self) -> Recipe | None:
        """The method as far as it is known before any node is connected: what is wrong with it is
        said at once.
        """
        return None

    def build_engine(self, *args: Any, **kwargs: Any) -> FlowerEngine:
        return FlowerEngine(*args, **kwargs)

    def choose_cohort_size(self, connected: int) -> int:
        """P where so many clients are connected."""
        return max(int(self.fraction_train * connected), self.min_train_nodes, 1)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: RoundConfig | None = None,
        evaluate_config: RoundConfig | None = None,
        evaluate_fn: EvaluateFunction | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """All rounds, until the last or until a stop rule has had enough: then no further message
        is sent.

        Configs are for every round, or functions of the round. `should_stop` is asked after each
        round. Replies are waited for `timeout` seconds; None: until they come.
        """
        use_json_log_if_asked()
        warn_about_version()
        options = replace(
            self.options,
            timeout=math.inf if timeout is None else timeout,
            train_config=train_config or {},
            evaluate_config=evaluate_config or {},
            evaluate_fn=evaluate_fn,
            metrics=self._known.metrics,
        )
        session = self._build_session(grid, initial_arrays, num_rounds, options)
        session.should_stop = should_stop
        self.summary()
        first = evaluate_fn(0, initial_arrays) if evaluate_fn else None
        result = session.run() if self.fraction_train else session.run_evaluation_only()
        if self.kept:  # personal parameters are returned as they were at first
            result.arrays = ArrayRecord({**initial_arrays, **result.arrays})
        if first is not None:
            result.evaluate_metrics_serverapp[0] = first
        return result

    def _build_session(
        self, grid: Grid, arrays: ArrayRecord, T: int, options: FlowerOptions
    ) -> Session:
        runner = self._build_runner()
        if runner and runner.layout.personal:
            judge, whole = options.evaluate_fn, arrays
            if judge is not None:  # what clients keep is as it was at first
                options = replace(
                    options, evaluate_fn=lambda t, made: judge(t, ArrayRecord({**whole, **made}))
                )
            staying = {slot.name for slot in runner.layout.personal}
            arrays = ArrayRecord({key: x for key, x in arrays.items() if key not in staying})
        template = ArrayTemplate.from_arrays(arrays, runner.layout if runner else None)
        own, context = list_overridden_hooks(self, FlrceStrategy), self._known
        host = self if {"configure_evaluate", "aggregate_evaluate"} & set(own) else None
        engine = self.build_engine(grid, template, options, runner, context.costs, host)
        w = template.pack(arrays)
        engine.held.initial = fingerprint_model(w)
        P = read_setting(self.folder, "per_round")
        recipe = self._complete_recipe(engine, P or self.choose_cohort_size(len(engine.clients())))
        session = Session(
            recipe,
            engine,
            w,
            T,
            self.folder,
            context.experiment or format_settings(recipe, T, options.seed),
            context.partition,
            context.watch,
        )
        if self.by_fraction:
            session.resized = lambda connected: self._complete_recipe(
                engine, self.choose_cohort_size(connected)
            )
        if {"configure_train", "aggregate_train"} & set(own):
            session.run_hooked_round = self._run_hooked_round
        self._engine = engine
        return session

    def _run_hooked_round(self, session: Session, state: State) -> Round:
        self._open = OpenRound(session, state)
        return run_hooked_round(self, self._open)

    def _complete_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        """The method with the stop rules and the minimum that the user added."""
        recipe = self.build_recipe(engine, P)
        if self._stops:
            recipe = replace(recipe, stop=AnyOf((recipe.stop, *self._stops)))
        # 1 is what a user gets who says nothing: a recipe that accepts empty rounds keeps its 0
        least = 0 if self._least == 1 and recipe.minimum == 0 else self._least
        return replace(recipe, minimum=max(least, recipe.minimum))

    def _build_runner(self) -> ClientRunner | None:
        """What the server knows of the network; None where nobody told it, and the method needs no
        more.
        """
        if self.model is None:
            draft = self.draft_recipe()
            needs = "parameters that stay with their client" if self.kept else ""
            if draft is not None and not isinstance(draft.submodel, FullModel):
                needs = f"recipe {draft.name} uses sub-models"
            if needs:
                raise BadInput(f"{needs}: pass model= and sample_shape= to the strategy")
            return None
        if self.sample_shape is None:
            raise BadInput("model= needs sample_shape=, such as (1, 28, 28)")
        none = Samples(torch.zeros(0, *self.sample_shape), torch.zeros(0, dtype=torch.long))
        return ClientRunner(self.model, self.sample_shape, none, kept=self.kept)

    def summary(self) -> None:
        """Log what the strategy is set to."""
        log.info(
            "%s: fraction_train %g, seed %d, state %s",
            type(self).__name__,
            self.fraction_train,
            self.options.seed,
            self.folder or "not kept",
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One round's messages. Only `start` can stop early, keep state and resume; a subclass may
        change `config`.
        """
        if self._open is None:
            options = replace(self.options, train_config=config)
            session = self._build_session(grid, arrays, 2**31, options)
            self._open = OpenRound(
                session, loop.make_initial_state(session.recipe, session.engine, session.w)
            )
        return self._open.prepare_messages(config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The final model if the run ended now, and the round's metrics."""
        return self._open.aggregate_replies(replies) if self._open else (None, None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model for the judges; nothing in Flower's loop, as they were asked as soon as there
        was a model.
        """
        evaluator = self._engine.evaluator if self._engine else None
        return (
            evaluator.configure_evaluate(server_round, arrays, config, grid)
            if evaluator and evaluator.asking
            else []
        )

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The judges' metrics as one."""
        if self._engine is None:
            return None
        evaluator = self._engine.evaluator
        return (
            evaluator.aggregate_evaluate(server_round, replies)
            if evaluator.asking
            else evaluator.by_clients
        )


class RecipeStrategy(FlrceStrategy):
    """Any recipe, of the catalogue or your own, as a Flower strategy.

    Its P counts, or as many as are connected; with `fraction_train`, that share of them. What else
    it takes is as in `FlrceStrategy`.
    """

    def __init__(self, recipe: Recipe | str, *fedavg: Any, **settings: Any) -> None:
        if isinstance(recipe, str):
            recipe = FORMER_NAMES.get(recipe, recipe)
            if recipe not in recipes.CATALOGUE:
                hint = suggest_replacement(recipe, recipes.CATALOGUE, CONTRIBUTED_METHODS)
                raise BadInput(f"recipe {recipe!r}: {hint}")
            recipe = recipes.CATALOGUE[recipe]()
        if not isinstance(recipe, Recipe):
            raise BadInput(f"recipe {format_one_line(recipe, 40)}: use a Recipe or the name of one")
        if len(fedavg) < 3:
            settings.setdefault("min_train_nodes", min(recipe.P, 2))
        self.refuse_unknown(settings)
        super().__init__(*fedavg, **settings)
        self.recipe, self.by_fraction = recipe, bool(fedavg) or "fraction_train" in settings
        self.kept = recipe.personal

    def draft_recipe(self) -> Recipe:
        return self.recipe

    def choose_cohort_size(self, connected: int) -> int:
        return super().choose_cohort_size(connected) if self.by_fraction else self.recipe.P

    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        return replace(self.recipe, P=P) if self.by_fraction else self.recipe


class FLrce(FlrceStrategy):
    """Relationship-based selection and early stopping; takes the place of Flower's FedAvg.

    Stops as its preset says, or with `psi` by the paper's rule: once a chosen client has so many
    conflicting peers on average, a number or a percentage of those chosen. `per_round` clients
    train, or `fraction_train` of those that are connected. `compressor` encodes the replies of
    clients that can (`client_app`, or the mod `compressing`).

    Where the preset averages models (all but `paper`, `authors`, and `hardened` with a psi), the
    last model is the final one in short runs and while rounds go straight on, else the average;
    whichever it is, it is evaluated. The rest is as in `FlrceStrategy`.
    """

    def __init__(
        self,
        *fedavg: Any,
        psi: float | str | None = None,
        per_round: int | None = None,
        preset: str = "default",
        compressor: Compressor | None = None,
        epochs: int = 1,
        batch: int = 32,
        lr: float = 0.01,
        **settings: Any,
    ) -> None:
        if per_round is not None and len(fedavg) < 3:
            settings.setdefault("min_train_nodes", min(per_round, 2))
        self.refuse_unknown(settings)
        super().__init__(*fedavg, **settings)
        self.per_round, self.by_fraction = per_round, per_round is None
        self.psi, self.preset, self.compressor = psi, preset, compressor
        self.local = {"epochs": epochs, "batch": batch, "lr": lr}
        if per_round is not None:
            require_count("per_round", per_round, least=1)
        self.draft_recipe()

    def draft_recipe(self) -> Recipe:
        return self._make_recipe(self.per_round or ANY_P)

    def choose_cohort_size(self, connected: int) -> int:
        return self.per_round or super().choose_cohort_size(connected)

    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        return self._make_recipe(P)

    def _make_recipe(self, P: int) -> Recipe:
        made = recipes.flrce(self.psi, self.preset, P, **self.local)
        return replace(made, compressor=self.compressor) if self.compressor else made


def list_stop_rules(
    stop: StopRule | None, budget: Mapping[str, Any] | None
) -> tuple[StopRule, ...]:
    """The rules that a user added to those of the recipe; BadInput where one is none."""
    rules = tuple(rule for rule in (stop, make_budget(budget) if budget else None) if rule)
    for rule in rules:
        if not callable(rule):
            raise BadInput(
                f"stop = {format_one_line(rule, 40)}: use a stop rule, such as"
                " flrce.methods.stopping.budget.Patience(10)"
            )
        replace(recipes.fedavg(), stop=rule)  # refuses values out of their bounds
    return rules


def make_budget(caps: Mapping[str, Any]) -> CostBudget:
    """The stop rule of a `budget` setting."""
    names = [field.name for field in fields(CostBudget)]
    for name in caps:
        if name not in names:
            raise BadInput(
                f"budget {format_one_line(name, 40)!r}: {suggest_name(str(name), names)}"
            )
    return CostBudget(**caps)
