"""The tables of an experiment file, each checked by itself: data, model, train, engine, fleet, stop."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, field_validator

from flrce.bounds import Batch, Count, Epochs, Positive, Rate
from flrce.compose import piece
from flrce.data.partition import SCHEMES
from flrce.data.sources import NAMES as DATA
from flrce.data.sources import Source, prepared, source
from flrce.data.trouble import SlowLabels
from flrce.errors import BadInput, nearest
from flrce.fleet import carbon
from flrce.fleet.costs import Profile, assigned, profile
from flrce.fleet.life import Life, life
from flrce.local.precision import Precision
from flrce.models.nets import NAMES as MODELS
from flrce.round.near import Wanted
from flrce.user_code import NAME

TEXT = ("tokenizer", "length", "most", "least")  # what is said about text


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
    ignore: str | list[str] | None = None  # columns of a table that are no features
    features: str | list[str] | None = None  # columns of a table that are features; none else are
    size: Annotated[int, Ge(1), Le(4096)] | None = None  # pixels: images of a folder are made that wide and high
    trouble: list[Any] | None = None  # what is wrong with some clients (data/trouble.py)

    def kinds(self) -> tuple[Any, ...]:
        """The trouble that the experiment names."""
        kinds = tuple(piece("trouble", wanted, "data") for wanted in self.trouble or ())
        for kind in kinds:
            if isinstance(kind, SlowLabels):
                profile(kind.profile, "data.trouble slow-labels: profile")
        return kinds

    def how(self) -> dict[str, Any]:
        """What the experiment says about data of one's own."""
        keys = ("target", "group", "test", "ignore", "features", "size", "kind", "layout", "fill", "standardise", *TEXT)
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
    options: dict[str, bool | int | float | str | list[str]] | None = None  # the network's arguments: width, ...
    kept: str | list[str] | None = None  # patterns of parameters that stay with their client
    fixed: str | list[str] | None = None  # patterns of parameters that neither train nor travel

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if ":" not in value:
            return _one_of(value, MODELS, 'or "package.module:Class"')
        if not NAME.fullmatch(value):
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
    updates: Wanted = None  # where a GPU's are summed and compared; None: there, if all pieces can (round/near.py)


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
        presence = "always" if self.presence is None else self.presence
        wanted = presence if isinstance(presence, list) else [presence]
        if not wanted:
            raise BadInput("fleet.presence = []: name at least one model of who is there, or leave it out")
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


def _one_of(value: str, valid: Any, more: str = "") -> str:
    if value not in valid:
        raise ValueError(f"{nearest(value[:60], valid)} {more}".strip())
    return value
