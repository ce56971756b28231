"""Flower's versions: which were tested, and what users of its older interface (`flwr.server`,
NumPyClient) change."""

import logging
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from flrce.errors import BadInput, format_one_line, suggest_name
from flrce.flower import SUPPORTED_VERSIONS
from flrce_client.errors import CLIENT_MIGRATION

log = logging.getLogger("flwr")


def explain_untested_version(installed: str) -> str:
    """What to say about a version of Flower that no test has seen; "" for the others.

    >>> explain_untested_version("1.41.0")
    ''
    """
    least, most = (tuple(map(int, text.split("."))) for text in SUPPORTED_VERSIONS.split(" to "))
    found = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
    if least <= found <= most:
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
