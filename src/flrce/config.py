"""The experiment file: TOML -> checked settings -> recipe, data, model, engine. All is refused before data loads."""

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flrce import recipes
from flrce.bounds import Batch, Count, Epochs, Positive, Rate, shown
from flrce.compose import compose, local_of, objective_of, piece
from flrce.data.federation import Federation, federate
from flrce.data.partition import SCHEMES
from flrce.data.sources import NAMES as DATA
from flrce.data.sources import Source, prepared, source
from flrce.data.trouble import SlowLabels
from flrce.errors import BadInput, brief, nearest
from flrce.fleet import carbon
from flrce.fleet.costs import Profile, assigned, profile
from flrce.fleet.life import Life, life
from flrce.local.precision import Precision
from flrce.models.nets import NAMES as MODELS
from flrce.pieces import Recipe
from flrce.written import tables_of

OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")  # package.module:Class
MOST_SEED = 2**63 - 1  # what TOML can hold
TEXT = ("tokenizer", "length", "most", "least")  # what is said about text
MOST_BYTES = 2**20  # of an experiment file


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Data(Section):
    name: str = "digits"
    path: str | None = None
    partition: str = "dirichlet"
    alpha: Positive = 0.1
    holdout: Annotated[float, Ge(0), Lt(1)] = 0.3
    minimum: Annotated[int, Ge(2), Le(10**9)] = 5
    target: str | list[str] | None = None  # of a table: what is to be learnt, by column
    group: str | None = None  # of a table: the column that names a sample's client
    test: str | None = None  # of a table: the column that marks test samples
    kind: Literal["classes", "values", "tokens", "labels"] | None = None  # what y holds, where its form does not say
    layout: Literal["images", "series", "table", "tokens"] | None = None  # what x holds
    fill: float | Literal["mean", "drop"] | None = None  # instead of what is missing
    tokenizer: str | None = None  # of text: the language model whose token ids it becomes
    length: Annotated[int, Ge(2), Le(10**6)] | None = None  # of text: ids in a window
    most: Count | None = None  # of text: windows or answers that a client has at most
    least: Count | None = None  # of text: clients that have fewer are left out
    standardise: bool | None = None
    trouble: list[Any] | None = None  # what is wrong with some clients (data/trouble.py)

    def kinds(self) -> tuple[Any, ...]:
        """The trouble that the experiment names."""
        kinds = tuple(piece("trouble", wanted, "data") for wanted in self.trouble or ())
        for kind in kinds:
            if isinstance(kind, SlowLabels):
                profile(kind.profile)
        return kinds

    def how(self) -> dict[str, Any]:
        """What the experiment says about data of one's own."""
        keys = ("target", "group", "test", "kind", "layout", "fill", "standardise", *TEXT)
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def read(self) -> Source:
        """The samples that the experiment names."""
        if self.path is None and (how := self.how()):
            raise BadInput(f"data.{next(iter(how))} is about data of your own; give data.path, or drop it")
        return source(self.name, self.path, **self.how())

    @field_validator("partition")
    @classmethod
    def _scheme(cls, value: str) -> str:
        return _one_of(value, SCHEMES)

    @field_validator("name")
    @classmethod
    def _source(cls, value: str) -> str:
        known = value in DATA or prepared(value)
        return value if known else _one_of(value, DATA, "(or prepare images of your own: flrce data prepare images)")


class Model(Section):
    name: str = "auto"
    options: dict[str, bool | int | float | str] | None = None  # arguments of the network: layers, width, ...
    kept: str | list[str] | None = None  # patterns of parameters that stay with their client
    fixed: str | list[str] | None = None  # patterns of parameters that neither train nor travel

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if ":" not in value:
            return _one_of(value, MODELS, 'or "package.module:Class"')
        if not OWN.fullmatch(value):
            raise ValueError('write "package.module:Class"')
        return value


class Train(Section):
    """How clients train: epochs (or steps), batch, rate, and how gradients become steps (docs/extending.md)."""

    batch: Batch = 16
    epochs: Epochs = 5
    lr: Rate = 0.1
    steps: Count | None = None  # batches a round, whatever a client's samples
    optimizer: Literal["sgd", "adam", "adamw"] | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    nesterov: bool | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    clip: Positive | None = None
    schedule: str | dict[str, Any] | None = None
    carry: bool | None = None  # the optimiser's state stays with the client from round to round
    update: list[Any] | None = None  # a chain of links instead of the six above
    augment: list[Any] | None = None


class EngineTable(Section):
    name: Literal["simulator", "flower"] = "simulator"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: Annotated[int, Ge(1), Le(1024)] | Literal["auto"] = "auto"
    kernel: Literal["auto", "native", "torch"] = "auto"
    eval_every: Count = 1
    precision: Precision | None = None  # of products on clients; None: float32


class Fleet(Section):
    profile: str | dict[str, Annotated[float, Gt(0), Le(1e9)]] = "jetson-nano"
    clients: str | dict[str, str] | None = None  # profiles by client or pattern, or a csv file of them
    availability: str | dict[str, Any] | None = None  # who can be reached in which round; all, unless given
    presence: str | dict[str, Any] | list[str | dict[str, Any]] | None = None  # and at which second; of several, all
    battery: str | dict[str, Any] | None = None  # what devices run on; mains, unless given
    carbon: str | None = None  # a file of carbon intensities by hour
    regions: str | dict[str, Annotated[float, Gt(0), Le(1e9)]] | None = None  # whose electricity; all of the file
    start: str | None = None  # when the run begins, UTC; with the file's first hour, unless given

    def there(self, seed: int) -> Callable[[str, int], bool] | None:
        """(client, round) -> whether it can be reached; None: always."""
        if self.availability is None:
            return None
        return partial(piece("availability", self.availability, "fleet"), seed)

    def live(self, seed: int, clients: tuple[str, ...], devices: Mapping[str, Profile]) -> Life | None:
        """The fleet by the clock; None: everyone is there all the time, and nothing else is asked of it."""
        if self.carbon is None and (self.regions is not None or self.start is not None):
            raise BadInput("fleet.regions and fleet.start are about carbon; give fleet.carbon, a file of intensities")
        if self.presence is None and self.battery is None and self.carbon is None:
            return None
        if self.availability is not None:
            raise BadInput("fleet.availability goes by rounds, all else in [fleet] by seconds; take fleet.presence")
        wanted = self.presence if isinstance(self.presence, list) else [self.presence or "always"]
        models = [piece("presence", each, "fleet") for each in wanted]
        battery = None if self.battery is None else piece("battery", self.battery, "fleet")
        grid = None if self.carbon is None else carbon.grid(self.carbon, self.regions, self.start, clients, seed)
        return life(seed, clients, devices, models, battery, grid)

    @field_validator("profile")
    @classmethod
    def _shipped(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        for name in [value] if isinstance(value, str) else value:
            profile(name)
        if not value:
            raise ValueError("an empty mix has no devices; name at least one profile")
        return value

    @field_validator("clients")
    @classmethod
    def _assigned(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        for name in set(assigned(value).values()) if value is not None else ():
            profile(name)
        return value


class Stop(Section):
    """Budgets that end any recipe's run."""

    rounds: Count | None = None
    bytes: Positive | None = None
    joules: Positive | None = None
    seconds: Positive | None = None
    grams: Positive | None = None


class Experiment(Section):
    """One run, or one per seed. `Experiment.load` reads a file; `Experiment(**tables)` works from Python.

    There `recipe` may also be a value, such as `replace(recipes.fedavg(P=4), server=Momentum())`: it says how many
    train in a round and how, and is kept as tables that name its pieces.
    """

    seed: Annotated[int, Ge(0), Le(MOST_SEED)] = 0
    rounds: Count = 100
    clients: Count = 100
    per_round: Count = 10
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    recipe: dict[str, Any] = Field(default_factory=lambda: {"name": "flrce"})
    engine: EngineTable = EngineTable()
    fleet: Fleet = Fleet()
    stop: Stop = Stop()
    objective: str | dict[str, Any] | None = None  # by default what the data's targets are

    def __init__(self, /, **tables: Any) -> None:  # a key may be called self
        if isinstance(tables.get("recipe"), Recipe):
            tables = _with_value(tables, tables["recipe"])
        try:
            super().__init__(**tables)
        except ValidationError as error:
            raise BadInput(f"experiment: {_explain(error)}") from None

    @model_validator(mode="after")
    def _consistent(self) -> "Experiment":
        if self.per_round > self.clients:
            raise ValueError(f"per_round must be at most clients = {self.clients}, got {self.per_round}; lower it")
        if self.data.path is not None and self.data.name != "digits":
            raise ValueError(f"data.name {self.data.name!r} and data.path exclude each other; drop one")
        self.build_recipe()
        self.fleet.there(self.seed)
        self.data.kinds()
        self.fleet.live(self.seed, (), {})
        if self.objective is not None:
            self.build_objective("classes")
        return self

    @classmethod
    def load(cls, path: Path | str | None = None, overrides: tuple[str, ...] | list[str] = ()) -> "Experiment":
        """An experiment file with `key=value` overrides; without a path, the defaults."""
        tables: dict[str, Any] = {}
        if path is not None:
            tables = read_toml(Path(path))
        for override in overrides:
            _set(tables, override)
        return cls.of(tables, str(path) if path else "experiment")

    @classmethod
    def of(cls, tables: dict[str, Any], where: str = "experiment") -> "Experiment":
        """Checked settings, or BadInput with one line."""
        try:
            return cls(**tables)
        except BadInput as why:
            raise BadInput(f"{where}: {str(why).removeprefix('experiment: ')}") from why
        except RecursionError as why:
            raise BadInput(f"{where}: tables within tables without end; pieces wrap a few others at most") from why

    def with_seed(self, seed: int) -> "Experiment":
        if type(seed) is not int or not 0 <= seed <= MOST_SEED:
            raise BadInput(f"seed = {shown(seed)}: should be an integer from 0 to {MOST_SEED}")
        return self.model_copy(update={"seed": seed})

    def toml(self) -> str:
        """The resolved experiment, as it is kept in the run directory."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def build_recipe(self) -> Recipe:
        local = {"P": self.per_round, **local_of(self.train.model_dump(exclude_none=True))}
        kept, fixed = _several(self.model.kept), _several(self.model.fixed)
        return compose(self.recipe, local, self.stop.model_dump(exclude_none=True), kept, fixed)

    def federate(self, pool: Source) -> Federation:
        """These samples shared out among the clients, with what is wrong with some of them."""
        d = self.data
        return federate(pool, d.partition, self.clients, self.seed, d.alpha, d.holdout, d.minimum, d.kinds())

    def build_objective(self, kind: str) -> Any:
        """What the model is for; `kind` is that of the data's targets, which decides where the experiment does not."""
        return objective_of(self.objective, kind)


def _several(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _with_value(tables: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The tables with a recipe that was made in Python written into them."""
    for key in ("per_round", "train"):
        if key in tables:
            raise BadInput(f"recipe is a value and has its own {key}; drop one of them")
    found = tables_of(recipe)
    model = tables.get("model", {})
    if not isinstance(model, dict):
        model = model.model_dump(exclude_none=True)
    clash = set(model) & set(found.get("model", {}))
    if clash:
        raise BadInput(f"recipe is a value and has its own model.{min(clash)}; drop one of them")
    return {**tables, **found, "model": {**model, **found.get("model", {})}}


def read_toml(path: Path, what: str = "give an experiment file (TOML)") -> dict[str, Any]:
    """A TOML file of moderate size as tables, or BadInput."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as why:
        raise BadInput(f"{path} cannot be read: {getattr(why, 'strerror', None) or why}; {what}") from why
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path} is larger than {MOST_BYTES} bytes; {what}")
    return _parsed(data.decode(errors="surrogateescape"), str(path))


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        text.encode()
        return tomllib.loads(text)
    except (ValueError, RecursionError) as why:  # giant integers and a thousand brackets are no TOMLDecodeError
        raise BadInput(f"{where} is not valid TOML: {brief(why, 200)}") from why


def _one_of(value: str, valid: Any, more: str = "") -> str:
    if value not in valid:
        raise ValueError(f"{nearest(value[:60], valid)} {more}".strip())
    return value


def _set(tables: dict[str, Any], override: str) -> None:
    """Apply `a.b=value`; the value is TOML, or else a plain string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise BadInput(f"--set {shown(override)} is no key=value; write for example --set recipe.psi=5")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    except (ValueError, RecursionError) as why:
        raise BadInput(f"--set {brief(key, 60)}: {brief(why, 200)}") from why
    *path, last = key.strip().split(".")
    table = tables
    for name in path:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise BadInput(f"--set {shown(override)}: {name!r} is a value, not a table; drop what follows it")
    table[last] = value


def _explain(error: ValidationError) -> str:
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
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        unknown = str(first["loc"][-1])
        return (
            f"{brief('.'.join([*path, unknown]), 100)} is no known key; {nearest(unknown[:60], section.model_fields)}"
        )
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not key:
        return message
    return f"{key} = {shown(first['input'])}: {message}"


def build_net(name: str, pool: Source, seed: int, options: dict[str, Any] | None = None) -> Any:
    """The network an experiment names, for these samples.

    A class of the user's gets, if it asks for them, `shape` (of one sample), `outputs` (how many numbers it is to
    give; also as `classes`) and `vocabulary` (how many token ids there are), and the options of the experiment.
    """
    import inspect

    import torch

    from flrce.compose import imported
    from flrce.models.nets import build

    if ":" not in name:
        return build(name, pool.shape, pool.outputs, seed, pool.vocabulary, pool.every, options, pool.shift < 0)
    make = imported(name, "model.name")
    wanted = inspect.signature(make).parameters
    known = {"shape": pool.shape, "outputs": pool.outputs, "classes": pool.outputs, "vocabulary": pool.vocabulary}
    given = {**{key: value for key, value in known.items() if key in wanted}, **(options or {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            net = make(**given)
        except TypeError as why:
            raise BadInput(
                f"model.name {name!r} cannot be built: {why}; accept shape, outputs, vocabulary, or nothing"
            ) from why
    if not isinstance(net, torch.nn.Module):
        raise BadInput(f"model.name {name!r} gives a {type(net).__name__}; it must be a torch.nn.Module")
    return net


__all__ = ["Experiment", "build_net", "recipes"]
