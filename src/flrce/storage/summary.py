"""A run in a few figures, and the machine and versions that made it."""

import math
import os
import platform
from typing import Any

import torch

from flrce.core.cost_table import COSTS, is_energy_known
from flrce.core.types import RoundRecord
from flrce.version import __version__


def get_versions() -> dict[str, str]:
    return {"flrce": __version__, "torch": torch.__version__, "python": platform.python_version()}


def describe_hardware() -> str:
    """The machine, with the GPU that runs go to where there is one."""
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} cores{gpu}"


def summarize_run(
    history: tuple[RoundRecord, ...], size: int, trainable: int, base: int = 0
) -> dict[str, Any]:
    """A run's final figures. `base`: bytes of the model that never travel; every client is given
    them once.
    """
    done = [h for h in history if h.outcome == "committed"]
    # a round that was not started may judge the one before
    seen = [h for h in history if h.last_model_metric is not None]
    last = RoundRecord(0)
    if seen:
        last = seen[-1]
    elif history:
        last = RoundRecord(
            0, metric=history[-1].evaluation.metric, lower=history[-1].evaluation.lower
        )
    handed = last.final_model_metric if last.evaluation.metric == "accuracy" else None
    return {
        **{name: x for cost in COSTS.values() for name, x in cost.summarize(history).items()},
        "metric": last.evaluation.metric,  # the headline of the final model, and of the last one
        "better": "lower" if last.evaluation.lower else "higher",
        "value": last.final_model_metric,
        "value_last": last.last_model_metric,
        "metrics": dict(last.evaluation.metrics_averaged or last.evaluation.metrics),
        "accuracy": handed,
        "accuracy_last": last.evaluation.accuracy,
        "accuracy_weighted": last.evaluation.accuracy_weighted,
        "loss": last.evaluation.loss,
        "stopped": history[-1].stop if history else "",
        "energy": name_energy_origin(history),
        "computation_efficiency": _accuracy_per_unit(handed, COSTS["joules"].of_run(history) / 1e3),
        "communication_efficiency": _accuracy_per_unit(
            handed, COSTS["bytes"].of_run(history) / 1e9
        ),
        **({"figures": dict(done[-1].figures)} if done and done[-1].figures else {}),
        "shadow_stops": _find_shadow_stops(done),
        "exploit_rounds": sum(h.exploit for h in done),
        "parameters": trainable,
        "floats_on_the_wire": size,
        "versions": get_versions(),
        "hardware": describe_hardware(),
        **count_provisioned_bytes(history, base),
    }


def name_energy_origin(history: tuple[RoundRecord, ...]) -> str:
    """Where the joules come from; "unknown" where nobody measured or modelled any."""
    if history and all(h.costs.measured for h in history):
        return "measured"
    trained = any(h.replied for h in history)
    return "unknown" if trained and not is_energy_known(history) else "modelled"


def _accuracy_per_unit(handed: float | None, spent: float) -> float | None:
    """Accuracy per unit spent; None where nothing was, or next to nothing by a client's own
    word.
    """
    if handed is None or spent == 0:
        return None
    found = handed / spent
    return found if math.isfinite(found) else None


def count_provisioned_bytes(history: tuple[RoundRecord, ...], base: int) -> dict[str, int]:
    """What the fixed part of the model weighs, and what it adds up to, given once to everyone asked
    to train.
    """
    asked = {client for record in history for client in record.chosen}
    return {"bytes_base": base, "bytes_provisioned": base * len(asked)} if base else {}


def _find_shadow_stops(done: list[RoundRecord]) -> dict[str, int]:
    """For every threshold psi of the paper's grid: the first round that would have ended the
    run.
    """
    first: dict[str, int] = {}
    for h in done:
        for psi in h.diagnostics.shadow:
            first.setdefault(f"{psi:g}", h.t)
    return first
