"""What a user may set about a run on Flower."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flrce.core.types import ClientCost, PendingTask, Reply, Round, Task
from flrce.devices.costs import DeviceProfile
from flrce.errors import BadInput, format_one_line
from flrce.training.metrics import MetricLike

# round, model -> the server's own metrics
EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
# replies, key of their weights -> metrics
MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]
RoundConfig = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]  # for every round, or by round


def resolve_config(config: RoundConfig, t: int) -> Mapping[str, Any]:
    """What clients are told in round t."""
    found = config(t) if callable(config) else config
    if not isinstance(found, Mapping):
        raise BadInput(
            f"the config of round {t} is {format_one_line(found, 40)}; use a ConfigRecord or a dict"
        )
    for key, value in found.items():
        try:
            ConfigRecord({key: value})
        except (TypeError, ValueError):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise BadInput(
                f"config of round {t}: {format_one_line(key, 40)!r} is a {kind}; numbers, text,"
                " bytes, booleans and lists of one of them can be sent: use float(...) and the"
                " like"
            ) from None
    return found


def require_count(name: str, value: Any, least: int = 0) -> None:
    """BadInput unless a setting is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(
            f"{name} = {format_one_line(value, 40)}: use a whole number, {least} or more"
        )


@dataclass(frozen=True)
class FlowerOptions:
    """How a run treats its fleet."""

    seed: int = 0
    timeout: float = 3600.0  # seconds a round waits for replies
    wait: float = 300.0  # seconds to wait for enough nodes
    available: int = 1  # nodes that are enough to start a round
    least_train: int = 1  # nodes without which no round is started
    # clients tell their names; "each": even if some do not; False: node ids are stable
    ask: bool | str = True
    fraction_evaluate: float = 1.0  # share of the clients that judge a model
    least_evaluate: int = 0
    eval_every: int = 1
    by_class: bool = False  # judges are asked for figures by class, which tell their label counts
    classes: tuple[str, ...] = ()  # their names, where they are known
    arrays_key: str = "arrays"
    config_key: str = "config"
    weight_key: str = "num-examples"  # the metric that weighs a reply
    train_sum: MetricsAggregation | None = None  # instead of weighted means
    evaluate_sum: MetricsAggregation | None = None
    # the objective's metrics, the primary metric first; none: accuracy
    judges: tuple[MetricLike, ...] = ()
    profile: DeviceProfile | None = None  # models the joules of clients that cannot measure them


class ModelledCosts(Protocol):
    """A model of what tasks cost, instead of what the clocks here say: for fleets that are only
    simulated.
    """

    now: float  # seconds of the run's clock for which costs are estimated

    def includes_client(self, client: str) -> bool: ...  # whether its costs can be modelled
    def estimate(self, task: Task) -> ClientCost: ...
    def estimate_round(self, tasks: Sequence[Task]) -> Sequence[ClientCost]: ...
    def book_costs(
        self, pending: Sequence[PendingTask], replies: Sequence[Reply]
    ) -> list[Reply]: ...
    def estimate_inquiry(self, client: str, down: int) -> ClientCost: ...


@dataclass(frozen=True)
class ServerContext:
    """What the server of an experiment knows besides the arrays."""

    experiment: str = ""  # TOML kept in the state folder instead of the strategy's own settings
    partition: Mapping[str, Any] | None = None  # who holds which samples
    costs: ModelledCosts | None = None  # a model of the fleet, where it is only simulated
    watch: Callable[[Round], None] | None = None  # is shown every round
    judges: tuple[MetricLike, ...] = ()  # metrics of the objective
