"""The experiment file: TOML -> checked settings -> recipe, data, model, engine."""

import logging
import tomllib
import typing
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from annotated_types import Ge, Le
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from flrce.config.compose import build_local_settings, compose_objective, compose_recipe
from flrce.config.network import build_net
from flrce.config.recipe_names import (
    DEFAULT_RECIPE,
    complete_recipe_table,
    complete_stored_table,
    explain_changed_name,
)
from flrce.config.sections import (
    STORED_MODEL_KEYS,
    DataSection,
    EngineSection,
    FleetSection,
    ModelSection,
    Section,
    StopSection,
    TrainSection,
    explain_old_availability,
    rename_model_keys,
)
from flrce.config.serialize import serialize_recipe
from flrce.core.bounds import PositiveInt, format_value
from flrce.core.files import parse_toml, read_limited
from flrce.core.pieces import Recipe
from flrce.core.roles import ROLES
from flrce.core.user_code import (
    NOTHING,
    Trust,
    UserCodeNotImported,
    apply_trust,
    current_trust,
    find_names,
    trust_file,
)
from flrce.data.federation import Federation, federate
from flrce.data.preprocessing import Preprocessing
from flrce.data.sources import SampleSpec, Source
from flrce.devices.cost_models import CostModel
from flrce.devices.costs import DeviceProfile
from flrce.devices.fleet_model import FleetDynamics
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.models.low_rank import factorize_network
from flrce.models.model_groups import GROUP_TENSOR, ModelGroups
from flrce.training.given_objectives import make_metrics, make_objective, name_object
from flrce.training.target_units import restore_target_units

log = logging.getLogger("flrce")
MAX_SEED = 2**63 - 1  # what TOML can hold
DATA_SUFFIXES = (".csv", ".tsv", ".npz", ".jsonl", ".parquet")  # often given as the experiment
GIVEN_PREFIX = "given:"  # before the names of an objective that came from Python
MAX_FILE_BYTES = 2**20  # of an experiment file


# id of an experiment -> it and its recipe; experiments are frozen, and copies have their own. Not a
# field: recipes are neither compared nor pickled with their experiment.
_recipes: dict[int, tuple["weakref.ref[Experiment]", Recipe]] = {}


class Experiment(Section):
    """One run, or one per seed: `Experiment.load(file)`, or `Experiment(**tables)` in Python.

    There `recipe` may also be a value, such as
    `replace(recipes.fedavg(P=4), server=ServerMomentum())`: it says how many train in a round and
    how, and is kept as tables that name its pieces.
    """

    seed: Annotated[int, Ge(0), Le(MAX_SEED)] = 0  # of every draw
    rounds: PositiveInt = 100  # at most
    clients: PositiveInt = 100
    per_round: PositiveInt = 10  # clients that train in a round
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    train: TrainSection = TrainSection()
    # a method of `flrce recipes list`, its settings, and pieces that replace its own
    recipe: dict[str, Any] = Field(default_factory=lambda: {"name": DEFAULT_RECIPE})
    engine: EngineSection = EngineSection()
    fleet: FleetSection = FleetSection()
    stop: StopSection = StopSection()
    objective: str | dict[str, Any] | None = None  # by default what the data's targets are
    # where modules that it names may be imported from
    _trust: Trust = PrivateAttr(default_factory=current_trust)
    _given: tuple[Any, Any] = PrivateAttr(default=(None, None))  # objective, metrics from Python

    def __init__(self, /, **tables: Any) -> None:  # a key may be called self
        if isinstance(tables.get("recipe"), Recipe):
            tables = _embed_recipe(tables, tables["recipe"])
        if "per_round" not in tables and not isinstance(tables.get("recipe"), Recipe):
            tables = _limit_cohort(tables)
        if isinstance(tables.get("recipe"), dict):
            tables = {**tables, "recipe": complete_recipe_table(tables["recipe"])}
        try:
            super().__init__(**tables)
        except ValidationError as error:
            raise BadInput(f"experiment: {_explain_error(error)}") from None

    @model_validator(mode="after")
    def _validate_consistency(self) -> "Experiment":
        if self.per_round > self.clients:
            raise ValueError(
                f"per_round must be at most clients = {self.clients}, got {self.per_round};"
                " lower it"
            )
        if self.data.path is not None and self.data.name != "digits":
            raise ValueError(
                f"data.name {self.data.name!r} and data.path exclude each other; drop one"
            )
        with suppress(UserCodeNotImported):  # a command that only looks goes on without
            self.build_recipe()
        with suppress(UserCodeNotImported), apply_trust(self._trust):
            self.data.build_trouble()
        with suppress(UserCodeNotImported):
            self.build_life((), {})
        with suppress(UserCodeNotImported):
            self.build_cost_model()
        with suppress(UserCodeNotImported):
            if self.objective is not None and not self._names_given_objective():
                self.build_objective("classes")
        return self

    @classmethod
    def load(
        cls,
        path: Path | str | None = None,
        overrides: tuple[str, ...] | list[str] = (),
        trust: Trust | bool = False,
    ) -> "Experiment":
        """An experiment file with `key=value` overrides; without a path, the defaults.

        A file that names code as "package.module:Class" is code. Modules are imported that lie
        beside the file, in the working directory, or are loaded already; with `trust`, from
        anywhere (docs/extending.md).
        """
        tables: dict[str, Any] = {}
        stored = path is not None and Path(path).with_name("rounds.jsonl").exists()
        if path is not None:
            tables = read_toml(Path(path))
        if stored and isinstance(tables.get("recipe"), dict):
            tables["recipe"] = complete_stored_table(tables["recipe"])
        for override in overrides:
            _apply_override(tables, override)
        if not stored:
            recipe = tables.get("recipe")
            notices = [explain_changed_name(recipe) if isinstance(recipe, dict) else ""]
            notices.append(explain_old_availability(tables.get("fleet")))
            for notice in filter(None, notices):
                log.warning("%s: %s", path or "experiment", notice)
        if not isinstance(trust, Trust):
            trust = trust_file(
                None if path is None else str(Path(path).parent.absolute()), everything=trust
            )
        return cls.from_tables(tables, str(path) if path else "experiment", trust)

    @classmethod
    def from_tables(
        cls, tables: dict[str, Any], where: str = "experiment", trust: Trust | bool = False
    ) -> "Experiment":
        """Checked settings, or a BadInput of one line. `trust`: import modules from anywhere."""
        if not isinstance(trust, Trust):
            trust = trust_file(None, everything=True) if trust else current_trust()
        try:
            with apply_trust(trust):
                return cls(**tables)
        except BadInput as why:
            raise BadInput(f"{where}: {str(why).removeprefix('experiment: ')}") from why
        except RecursionError as why:
            raise BadInput(
                f"{where}: tables within tables without end; pieces wrap a few others at most"
            ) from why

    def with_seed(self, seed: int) -> "Experiment":
        if type(seed) is not int or not 0 <= seed <= MAX_SEED:
            raise BadInput(
                f"seed = {format_value(seed)}: should be an integer from 0 to {MAX_SEED}"
            )
        return self.model_copy(update={"seed": seed})

    def to_toml(self) -> str:
        """The resolved experiment, as it is kept in the run directory."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @property
    def get_trust(self) -> Trust:
        """Where modules that it names may be imported from."""
        return self._trust

    def to_tables(self) -> dict[str, Any]:
        """The settings that were given, without defaults: some of these follow from the data."""
        return self.model_dump(exclude_none=True, exclude_unset=True)

    def with_tables(self, *tables: Mapping[str, Any]) -> "Experiment":
        """The experiment with other tables in place of some; it may import what it could before."""
        merged = self.to_tables()
        for table in tables:
            merged |= table
        return Experiment.from_tables(merged, trust=self._trust)

    def build_recipe(self) -> Recipe:
        """The recipe, built and validated once."""
        known = _recipes.get(id(self))
        if known is not None and known[0]() is self:
            return known[1]
        recipe = self._compose_recipe()
        key = id(self)
        _recipes[key] = (weakref.ref(self, lambda _: _recipes.pop(key, None)), recipe)
        return recipe

    def _compose_recipe(self) -> Recipe:
        with apply_trust(self._trust):
            local = {
                "P": self.per_round,
                "rounds": self.rounds,
                **build_local_settings(self.train.model_dump(exclude_none=True)),
            }
            personal, frozen = _as_tuple(self.model.kept), _as_tuple(self.model.fixed)
            return compose_recipe(
                self.recipe, local, self.stop.model_dump(exclude_none=True), personal, frozen
            )

    def personal_patterns(self) -> tuple[str, ...]:
        """Patterns of personal parameters, by recipe and model.personal. Imports nothing."""
        plain = {
            key: value
            for key, value in self.recipe.items()
            if key not in ROLES or not any(find_names(value))
        }
        with apply_trust(NOTHING):
            return compose_recipe(
                plain, {"P": self.per_round}, {}, _as_tuple(self.model.kept)
            ).personal

    def build_network(self, samples: Source | SampleSpec) -> Any:
        """The network that the experiment names, for these samples."""
        spec = samples.spec if isinstance(samples, Source) else samples
        with apply_trust(self._trust):
            return build_net(self.model.name, spec, self.seed, self.model.options)

    def complete_network(self, net: Any) -> Any:
        """The network with `model.lowrank` layers, once per global model of the recipe."""
        gamma, recipe = self.model.lowrank, self.build_recipe()
        net = net if gamma is None else factorize_network(net, gamma, self.seed)
        if recipe.model_groups == 1:
            return net
        if GROUP_TENSOR not in recipe.personal:
            raise BadInput(
                'a client keeps the number of its model group; set model.personal = "group"'
            )
        if recipe.aggregator.model_groups != recipe.model_groups:
            raise BadInput(
                f"recipe.aggregator {type(recipe.aggregator).__name__} does not keep"
                f' {recipe.model_groups} global models apart; use "group-mean" with as many groups'
            )
        alone = isinstance(net, ModelGroups)
        return net if alone else ModelGroups(net, recipe.model_groups, self.seed)

    def build_life(
        self, clients: tuple[str, ...], devices: Mapping[str, DeviceProfile]
    ) -> FleetDynamics | None:
        """The fleet by the clock; None: everyone can be reached all the time."""
        with apply_trust(self._trust):
            return self.fleet.build_fleet_model(self.seed, clients, devices)

    def build_cost_model(self) -> CostModel | None:
        """What has the last word on costs; None: the devices' profiles."""
        with apply_trust(self._trust):
            return self.fleet.build_cost_model()

    def federate(self, pool: Source) -> Federation:
        """These samples shared out among the clients, with what is wrong with some of them."""
        d = self.data
        with apply_trust(self._trust):
            kinds = d.build_trouble()
        return federate(
            pool, d.partition, self.clients, self.seed, d.alpha, d.holdout, d.minimum, kinds
        )

    def build_objective(self, kind: str, prepared: Preprocessing | None = None) -> Any:
        """The objective that the experiment names, else that of the targets' `kind`. Metrics are
        in the unit that targets had before they were `prepared`.
        """
        objective, metrics = self._given
        named = self._names_given_objective()
        if named and objective is None and metrics is None:
            raise BadInput(
                f"the objective or metrics {named} came from Python; pass them again:"
                " flrce.run(..., objective=..., metrics=...)"
            )
        with apply_trust(self._trust):
            default = compose_objective(None if named else self.objective, kind)
            return restore_target_units(make_objective(objective, metrics, default, kind), prepared)

    def with_objective(self, objective: Any, metrics: Any = None) -> "Experiment":
        """The experiment with an objective or metrics from Python; its file has their names."""
        if objective is None and metrics is None:
            return self
        named = [] if objective is None else [name_object(objective)]
        made_metrics = None if metrics is None else make_metrics(metrics)
        named += [str(getattr(metric, "name", metric)) for metric in made_metrics or ()]
        changed = self.model_copy(update={"objective": GIVEN_PREFIX + "+".join(named)})
        changed._given = (objective, made_metrics)
        return changed

    def _names_given_objective(self) -> str:
        """What came from Python by its names; "" where the experiment names all by itself."""
        objective = self.objective
        if isinstance(objective, str) and objective.startswith(GIVEN_PREFIX):
            return objective.removeprefix(GIVEN_PREFIX)
        return ""


def _as_tuple(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _limit_cohort(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables, with all clients in each round where fewer exist than usually train in one."""
    usual = Experiment.model_fields["per_round"].default
    count = tables.get("clients")
    few = isinstance(count, int) and not isinstance(count, bool) and 0 < count < usual
    return {**tables, "per_round": count} if few else tables


def _embed_recipe(tables: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The tables with a recipe that was made in Python written into them."""
    for key in ("per_round", "train"):
        if key in tables:
            raise BadInput(f"recipe is a value and has its own {key}; drop one of them")
    found = serialize_recipe(recipe)
    model = tables.get("model", {})
    if not isinstance(model, dict):
        model = model.model_dump(exclude_none=True)
    model = rename_model_keys(model)
    clash = set(model) & set(found.get("model", {}))
    if clash:
        key = next(new for new, stored in STORED_MODEL_KEYS.items() if stored in clash)
        raise BadInput(f"recipe is a value and has its own model.{key}; drop one of them")
    return {**tables, **found, "model": {**model, **found.get("model", {})}}


def read_toml(path: Path, what: str = "give an experiment file (TOML)") -> dict[str, Any]:
    """A TOML file of moderate size as tables, or BadInput."""
    if path.suffix.lower() in DATA_SUFFIXES and path.exists():
        raise BadInput(
            f"{path} is data, not an experiment file; name it with --set data.path={path}"
            " (and data.target)"
        )
    data = read_limited(path, MAX_FILE_BYTES, what)
    return _parse_toml(data.decode(errors="surrogateescape"), str(path))


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        text.encode()
        return parse_toml(text)
    except ValueError as why:  # giant integers and a thousand brackets are no TOMLDecodeError
        raise BadInput(f"{where} is not valid TOML: {format_one_line(why, 200)}") from why


def _apply_override(tables: dict[str, Any], override: str) -> None:
    """Apply `a.b=value`; the value is TOML, or else a plain string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise BadInput(
            f"--set {format_value(override)} is no key=value; write for example --set recipe.psi=5"
        )
    try:
        value = parse_toml(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    except ValueError as why:
        raise BadInput(f"--set {format_one_line(key, 60)}: {format_one_line(why, 200)}") from why
    *path, last = key.strip().split(".")
    table = tables
    for name in path:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise BadInput(
                f"--set {format_value(override)}: {name!r} is a value, not a table; drop what"
                " follows it"
            )
    table[last] = value


def _explain_error(error: ValidationError) -> str:
    """The first problem, as `key = value: rule; remedy`."""
    first = error.errors()[0]
    path: list[str] = []
    section: Any = Experiment
    for part in map(str, first["loc"]):
        if part not in section.model_fields:
            break  # pydantic goes on to name the kinds of a union
        path.append(part)
        section = section.model_fields[part].annotation
        if not hasattr(section, "model_fields"):
            break
    kinds = [kind for kind in typing.get_args(section) or (section,) if kind is not type(None)]
    table = all(typing.get_origin(kind) is dict for kind in kinds) and len(first["loc"]) > len(path)
    if table:
        path.append(str(first["loc"][len(path)]))  # a key that the user named: model.options.width
    key = format_one_line(".".join(path), 100)
    if first["type"] == "extra_forbidden":
        return _explain_unknown_key(path, str(first["loc"][-1]), section)
    if first["type"] in ("model_type", "dict_type") and (
        hasattr(section, "model_fields") or key == "recipe"
    ):
        if key in ("recipe", "model", "engine", "data"):
            some = "name"
        else:
            some = next(iter(section.model_fields))
        return (
            f"{key} = {format_value(first['input'])}: is a table; set one of its keys, such as"
            f" {key}.{some}"
        )
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if table:  # all kinds of value that would do
        message = " or ".join(
            dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in error.errors())
        )
        return f"{key} = {format_value(first['input'])}: should be {message}"
    if not key:
        return message
    return f"{key} = {format_value(first['input'])}: {message}"


def _explain_unknown_key(path: Sequence[str], unknown: str, section: Any) -> str:
    """A key that the section does not have; one without a table may belong into one."""
    hint = suggest_name(unknown[:60], section.model_fields)
    for name, field in Experiment.model_fields.items() if not path else ():
        if unknown in getattr(field.annotation, "model_fields", ()):
            hint = f"did you mean {f'{name}.{unknown}'!r}?"
            break
    return f"{format_one_line('.'.join([*path, unknown]), 100)} is no known key; {hint}"
