"""What a user may set about a run on Flower, in arguments and in the environment; which versions of
Flower were tested, and what users of its older interface (`flwr.server`, NumPyClient) change.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flrce.core.types import ClientCost, PendingTask, Reply, Round, Task
from flrce.devices.costs import DeviceProfile
from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.flower import SUPPORTED_VERSIONS
from flrce.training.metrics import MetricLike
from flrce_client.errors import CLIENT_MIGRATION

# round, model -> the server's own metrics
EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
# replies, key of their weights -> metrics
MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]
RoundConfig = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]  # for every round, or by round
log = logging.getLogger("flwr")
LOG_VARIABLE = "FLRCE_LOG"
MAX_LINE_CHARACTERS = 4000


def resolve_config(config: RoundConfig, t: int) -> Mapping[str, Any]:
    """What clients are told in round t."""
    entries = config(t) if callable(config) else config
    if not isinstance(entries, Mapping):
        raise BadInput(
            f"the config of round {t} is {format_one_line(entries, 40)}; use a ConfigRecord or a"
            " dict"
        )
    for key, value in entries.items():
        try:
            ConfigRecord({key: value})
        except (TypeError, ValueError):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise BadInput(
                f"config of round {t}: {format_one_line(key, 40)!r} is a {kind}; numbers, text,"
                " bytes, booleans and lists of one of them can be sent: use float(...) and the"
                " like"
            ) from None
    return entries


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
    train_config: RoundConfig = field(default_factory=dict)
    evaluate_config: RoundConfig = field(default_factory=dict)
    evaluate_fn: EvaluateFunction | None = None  # the server's own judgement of a model
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
    metrics: tuple[MetricLike, ...] = ()
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
    def estimate_evaluation(self) -> Sequence[tuple[str, ClientCost]]: ...


@dataclass(frozen=True)
class ServerContext:
    """What the server of an experiment knows besides the arrays."""

    experiment: str = ""  # TOML kept in the state folder instead of the strategy's own settings
    partition: Mapping[str, Any] | None = None  # who holds which samples
    costs: ModelledCosts | None = None  # a model of the fleet, where it is only simulated
    watch: Callable[[Round], None] | None = None  # is shown every round
    metrics: tuple[MetricLike, ...] = ()  # metrics of the objective


def explain_untested_version(installed: str) -> str:
    """What to say about a version of Flower that no test has seen; "" for the others.

    >>> explain_untested_version("1.41.0")
    ''
    """
    first, last = (tuple(map(int, text.split("."))) for text in SUPPORTED_VERSIONS.split(" to "))
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if first <= numbers <= last:
        return ""
    return (
        f"flwr {installed} was not tested with this version of flrce; tested were"
        f" {SUPPORTED_VERSIONS}: if a run fails, install one of those"
    )


def warn_about_version() -> None:
    """Log a line where the installed Flower was not tested."""
    try:
        problem = explain_untested_version(version("flwr"))
    except PackageNotFoundError:  # a checkout of Flower's own
        return
    if problem:
        log.warning(problem)


#: argument of the older FedAvg -> what takes its place
LEGACY_ARGUMENTS = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "evaluate_fn": "evaluate_fn of start",
    "on_fit_config_fn": "train_config of start",
    "on_evaluate_config_fn": "evaluate_config of start",
    "initial_parameters": "initial_arrays of start",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "accept_failures": "minimum_replies",
    "inplace": "nothing, leave it out",
}
#: what a ClientApp of the older interface raises when it is sent a message of the newer one
LEGACY_CLIENT_MARKS = ("fitins.parameters", "evaluateins.parameters")


def refuse_unknown_arguments(strategy: str, given: Iterable[str], known: Iterable[str]) -> None:
    """BadInput for arguments that a strategy does not have, with what takes their place."""
    unknown = [name for name in given if name not in set(known)]
    if not unknown:
        return
    legacy = [name for name in unknown if name in LEGACY_ARGUMENTS]
    if legacy:
        moves = ", ".join(f"{name} -> {LEGACY_ARGUMENTS[name]}" for name in legacy)
        raise BadInput(
            f"{strategy}: arguments of Flower's older strategies (flwr.server); flrce needs the"
            f" Message API (flwr.serverapp): {moves}; see docs/flower.md#from-the-older-interface"
        )
    name = unknown[0]
    raise BadInput(
        f"{strategy} has no argument {format_one_line(name, 40)!r}: {suggest_name(name, known)}"
    )


def explain_legacy_client(reason: str) -> str:
    """The migration, where a client's failure is that of the older interface; else ""."""
    return CLIENT_MIGRATION if any(mark in reason for mark in LEGACY_CLIENT_MARKS) else ""


class JsonLineFormatter(logging.Formatter):
    """One record as one JSON object: when, level, logger, message, and the error where there is
    one.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": format_one_line(record.getMessage(), MAX_LINE_CHARACTERS),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def use_json_log_if_asked() -> bool:
    """Give the handlers of Flower's log the JSON formatter where the environment asks for it."""
    kind = os.environ.get(LOG_VARIABLE, "")
    if kind in ("", "text"):
        return False
    if kind != "json":
        raise BadInput(f"{LOG_VARIABLE}={format_one_line(kind, 40)}: use json or text")
    for handler in logging.getLogger("flwr").handlers:
        handler.setFormatter(JsonLineFormatter())
    return True
