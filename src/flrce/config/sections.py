"""The tables of an experiment file, each with its checks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flrce.config.compose import build_piece
from flrce.core.bounds import BatchSize, EpochCount, LearningRate, PositiveFloat, PositiveInt
from flrce.core.user_code import MODULE_PATH
from flrce.data.partition import PARTITION_SCHEMES
from flrce.data.sources import DATASET_NAMES as DATA
from flrce.data.sources import STUDY_NAMES, Source, is_prepared, load_source
from flrce.data.trouble import SlowLabels
from flrce.devices import carbon
from flrce.devices.cost_models import CostModel
from flrce.devices.costs import DeviceProfile, load_profile, read_device_assignments
from flrce.devices.fleet_model import FleetDynamics, build_fleet_dynamics
from flrce.errors import BadInput, suggest_name
from flrce.models.nets import NETWORK_NAMES as MODELS
from flrce.training.precision import Precision

READER_SETTINGS = (  # of the user's own data
    *("target", "group", "test", "ignore", "features", "text", "buckets", "size"),
    *("kind", "layout", "fill", "standardise", "tokenizer", "length", "most", "least"),
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataSection(Section):
    name: str = "digits"  # a data set of `flrce data list`
    path: str | None = None  # a file or folder of your own, instead of a name
    partition: str = "dirichlet"  # who holds what
    alpha: PositiveFloat = 0.1  # of dirichlet: smaller values skew the labels more
    holdout: Annotated[float, Ge(0), Lt(1)] = 0.3  # share of a client's samples for evaluation
    minimum: Annotated[int, Ge(2), Le(10**9)] = 5  # samples that every client has at least
    target: str | list[str] | None = None  # of a table: what is to be learnt, by column
    group: str | None = None  # of a table: the column that names a sample's client
    test: str | None = None  # of a table: the column that marks test samples
    # what y holds, where its form does not say
    kind: Literal["classes", "values", "tokens", "labels"] | None = None
    layout: Literal["images", "series", "table", "tokens"] | None = None  # what x holds
    fill: float | Literal["mean", "drop"] | None = None  # instead of what is missing
    tokenizer: str | None = None  # of text: the language model whose token ids it becomes
    length: Annotated[int, Ge(2), Le(10**6)] | None = None  # of text: ids in a window
    most: PositiveInt | None = None  # of text: windows or answers that a client has at most
    least: PositiveInt | None = None  # of text: clients that have fewer are left out
    standardise: bool | None = None  # features (and values to be learnt) in standard deviations
    ignore: str | list[str] | None = None  # columns of a table that are no features
    features: str | list[str] | None = None  # columns of a table that are features; none else are
    text: str | list[str] | None = None  # columns of a table that hold text to classify
    buckets: Annotated[int, Ge(16), Le(1 << 20)] | None = None  # hashed n-grams of a text column
    # pixels: images of a folder are made that wide and high
    size: Annotated[int, Ge(1), Le(4096)] | None = None
    trouble: list[Any] | None = None  # what is wrong with some clients (data/trouble.py)

    def build_trouble(self) -> tuple[Any, ...]:
        """The trouble that the experiment names."""
        kinds = tuple(build_piece("trouble", wanted, "data") for wanted in self.trouble or ())
        for kind in kinds:
            if isinstance(kind, SlowLabels):
                load_profile(kind.profile, "data.trouble slow-labels: profile")
        return kinds

    def reader_options(self) -> dict[str, Any]:
        """What the experiment says about data of one's own."""
        return {key: value for key in READER_SETTINGS if (value := getattr(self, key)) is not None}

    def read_source(self) -> Source:
        """The samples that the experiment names."""
        if self.path is None and (how := self.reader_options()):
            raise BadInput(
                f"data.{next(iter(how))} is about data of your own; give data.path, or drop it"
            )
        return load_source(self.name, self.path, **self.reader_options())

    @field_validator("fill", mode="before")
    @classmethod
    def _validate_fill(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("mean", "drop"):
            raise ValueError("use a number, 'mean' or 'drop'; leave it out to refuse gaps")
        return value

    @field_validator("partition")
    @classmethod
    def _validate_partition(cls, value: str) -> str:
        return _require_one_of(value, PARTITION_SCHEMES)

    @field_validator("name")
    @classmethod
    def _validate_name(cls, value: str) -> str:
        if value in (*DATA, *STUDY_NAMES) or is_prepared(value):
            return value
        return _require_one_of(
            value, DATA, "(or prepare images of your own: flrce data prepare images)"
        )


#: a key of [model] in experiment files -> its name in run directories, which files may use too
STORED_MODEL_KEYS = {"personal": "kept", "frozen": "fixed"}


def rename_model_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a model with its keys as run directories have them."""
    for key, stored in STORED_MODEL_KEYS.items():
        if key in table and stored in table:
            raise ValueError(f"model.{key} and its old name model.{stored} are given; drop one")
    return {STORED_MODEL_KEYS.get(key, key): value for key, value in table.items()}


class ModelSection(Section):
    name: str = "auto"  # a network by name, or "module:Class"
    # the network's arguments: width, ...
    options: dict[str, bool | int | float | str | list[str]] | None = None
    # patterns of parameters that stay with their client
    kept: str | list[str] | None = None
    # patterns of parameters that neither train nor travel
    fixed: str | list[str] | None = None
    # FedPara: weights are Hadamard products of low-rank factors, 0 the fewest floats, 1 the most
    lowrank: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _use_stored_names(cls, table: Any) -> Any:
        return rename_model_keys(table) if isinstance(table, Mapping) else table

    @field_validator("name")
    @classmethod
    def _validate_model_name(cls, value: str) -> str:
        if ":" not in value:
            return _require_one_of(value, MODELS, 'or "package.module:Class"')
        if not MODULE_PATH.fullmatch(value):
            raise ValueError('write "package.module:Class"')
        return value


class TrainSection(Section):
    """How clients train: epochs (or steps), batch, rate, and the update (docs/piece-link.md)."""

    batch: BatchSize = 16  # samples in a step
    epochs: EpochCount = 5  # passes over a client's samples in a round
    lr: LearningRate = 0.1  # learning rate of clients
    steps: PositiveInt | None = None  # batches a round, whatever a client's samples
    optimizer: Literal["sgd", "adam", "adamw"] | None = None  # sgd, unless given
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None  # of sgd
    nesterov: bool | None = None  # Nesterov's momentum
    weight_decay: Annotated[float, Field(ge=0)] | None = None  # added to the gradient
    clip: PositiveFloat | None = None  # gradients are shortened to this length
    schedule: str | dict[str, Any] | None = None  # of the rate: "cosine", "warm-up", your own
    carry: bool | None = None  # the optimiser's state stays with the client from round to round
    update: list[Any] | None = None  # a chain of links instead of the six above
    augment: list[Any] | None = None  # transforms of each batch


class EngineSection(Section):
    name: Literal["simulator", "flower"] = "simulator"  # flower: its messages, in this process
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where clients train
    workers: Annotated[int, Ge(1), Le(1024)] | Literal["auto"] = "auto"  # clients at once on a CPU
    kernel: Literal["auto", "native", "torch"] = "auto"  # fused kernels, or PyTorch
    eval_every: PositiveInt = 1  # rounds between evaluations
    precision: Precision | None = None  # of products on clients; None: float32
    # where updates of a GPU are summed; None: there, if all pieces can
    updates: Literal["device", "host"] | None = None


class FleetSection(Section):
    profile: str | dict[str, Annotated[float, Gt(0), Le(1e9)]] = (
        "jetson-nano"  # a device, or shares
    )
    # profiles by client or pattern, or a csv file of them
    clients: str | dict[str, str] | None = None
    # who can be reached when; of several models, all must say so; everyone, unless given
    availability: str | dict[str, Any] | list[str | dict[str, Any]] | None = None
    battery: str | dict[str, Any] | None = None  # what devices run on; mains, unless given
    # energy of networks behind the devices, booked apart; "device": none
    network: Literal["device", "fixed", "mobile"] | None = None
    carbon: str | None = None  # a file of carbon intensities by hour
    # whose electricity; all of the file
    regions: str | dict[str, Annotated[float, Gt(0), Le(1e9)]] | None = None
    start: str | None = None  # when the run begins, UTC; with the file's first hour, unless given
    # seconds from a round's start to the next one's, at least
    interval: PositiveFloat | None = None
    # what work costs, where profiles are not enough: a csv file, or a cost model
    costs: str | dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_presence(cls, table: Any) -> Any:
        """`presence` is the name that availability by the second had."""
        if not isinstance(table, dict) or "presence" not in table:
            return table
        rest = {key: value for key, value in table.items() if key != "presence"}
        if table["presence"] is None:  # as stored records have it
            return rest
        if rest.get("availability") is not None:
            raise ValueError("fleet.presence is the old name of fleet.availability; drop one")
        return {**rest, "availability": table["presence"]}

    def build_cost_model(self) -> CostModel | None:
        """What has the last word on costs; None: the devices' profiles."""
        wanted = self.costs
        if isinstance(wanted, str) and wanted.endswith(".csv"):
            wanted = {"piece": "table", "path": wanted}
        model: CostModel | None = None if wanted is None else build_piece("costs", wanted, "fleet")
        return model

    def build_fleet_model(
        self, seed: int, clients: tuple[str, ...], devices: Mapping[str, DeviceProfile]
    ) -> FleetDynamics | None:
        """The fleet by the clock; None if everyone can always be reached and nothing is asked."""
        if self.carbon is None and (self.regions is not None or self.start is not None):
            raise BadInput(
                "fleet.regions and fleet.start are about carbon; give fleet.carbon, a file of"
                " intensities"
            )
        asked = (self.availability, self.battery, self.carbon, self.interval)
        if all(value is None for value in asked):
            return None
        wanted = "always" if self.availability is None else self.availability
        if wanted == []:
            raise BadInput("fleet.availability = []: name at least one model, or leave it out")
        models = [
            build_piece("availability", each, "fleet")
            for each in (wanted if isinstance(wanted, list) else [wanted])
        ]
        battery = None if self.battery is None else build_piece("battery", self.battery, "fleet")
        if self.carbon is None:
            grid = None
        else:
            grid = carbon.build_carbon_grid(self.carbon, self.regions, self.start, clients, seed)
        interval = self.interval or 0.0
        return build_fleet_dynamics(seed, clients, devices, models, battery, grid, interval)

    @field_validator("profile")
    @classmethod
    def _validate_profile(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        for name in [value] if isinstance(value, str) else value:
            load_profile(name)
        if not value:
            raise ValueError("an empty mix has no devices; name at least one profile")
        return value

    @field_validator("clients")
    @classmethod
    def _validate_clients(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        for name in set(read_device_assignments(value).values()) if value is not None else ():
            load_profile(name)
        return value


def explain_old_availability(fleet: Any) -> str:
    """One line where a [fleet] table uses a name or model of version 0.1; "" elsewhere."""
    if not isinstance(fleet, Mapping):
        return ""
    if "presence" in fleet:
        return "fleet.presence is now called fleet.availability; the old name means the same"
    wanted = fleet.get("availability")
    name = wanted.get("piece") if isinstance(wanted, Mapping) else wanted
    if name not in ("by-chance", "daily"):
        return ""
    new = "chance" if name == "by-chance" else "diurnal"
    return (
        f'fleet.availability = "{name}" goes by rounds and keeps its meaning; "{new}" goes by the'
        " seconds of the run's clock (docs/availability.md)"
    )


class StopSection(Section):
    """Budgets that end any recipe's run."""

    rounds: PositiveInt | None = None
    bytes: PositiveFloat | None = None  # uploads and downloads
    joules: PositiveFloat | None = None  # of all clients
    seconds: PositiveFloat | None = None  # of the run's clock, waiting included
    grams: PositiveFloat | None = None  # of CO2; needs fleet.carbon


def _require_one_of(value: str, valid: Any, more: str = "") -> str:
    if value not in valid:
        raise ValueError(f"{suggest_name(value[:60], valid)} {more}".strip())
    return value
