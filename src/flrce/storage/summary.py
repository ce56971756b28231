"""The summary of a run: final figures, versions and hardware."""

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
    """Architecture, number of cores and GPU of this machine."""
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return f"{platform.machine()}, {os.cpu_count()} cores{gpu}"


def summarize_run(
    history: tuple[RoundRecord, ...], size: int, trainable: int, base: int = 0
) -> dict[str, Any]:
    """A run's final figures. `base`: bytes of the frozen part, sent once to every client."""
    done = [h for h in history if h.outcome == "committed"]
    # a round that was not started may evaluate the model of the previous one
    evaluated = [h for h in history if h.last_model_metric is not None]
    last = RoundRecord(0)
    if evaluated:
        last = evaluated[-1]
    elif history:
        newest = history[-1].evaluation
        last = RoundRecord(0, metric=newest.metric, lower=newest.lower)
    joules, nbytes = COSTS["joules"].of_run(history), COSTS["bytes"].of_run(history)
    accuracy = last.final_model_metric if last.evaluation.metric == "accuracy" else None
    return {
        **{name: x for cost in COSTS.values() for name, x in cost.summarize(history).items()},
        "metric": last.evaluation.metric,  # primary metric of `value` and `value_last`
        "better": "lower" if last.evaluation.lower else "higher",
        "value": last.final_model_metric,
        "value_last": last.last_model_metric,
        "metrics": dict(last.evaluation.metrics_averaged or last.evaluation.metrics),
        "accuracy": accuracy,
        "accuracy_last": last.evaluation.accuracy,
        "accuracy_weighted": last.evaluation.accuracy_weighted,
        "loss": last.evaluation.loss,
        "stopped": history[-1].stop if history else "",
        "energy": name_energy_origin(history),
        "computation_efficiency": _accuracy_per_unit(accuracy, joules / 1e3),
        "communication_efficiency": _accuracy_per_unit(accuracy, nbytes / 1e9),
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
    """Origin of the joules: "measured", "modelled" or "unknown"."""
    if history and all(h.costs.measured for h in history):
        return "measured"
    trained = any(h.replied for h in history)
    return "unknown" if trained and not is_energy_known(history) else "modelled"


def _accuracy_per_unit(accuracy: float | None, cost: float) -> float | None:
    """Accuracy per unit of cost; None where the cost is zero or too small to divide by."""
    if accuracy is None or cost == 0:
        return None
    ratio = accuracy / cost
    return ratio if math.isfinite(ratio) else None


def count_provisioned_bytes(history: tuple[RoundRecord, ...], base: int) -> dict[str, int]:
    """Bytes of the frozen part of the model, of sending it once to every selected client, and to
    all others where every client evaluates the model.
    """
    if not base:
        return {}
    selected = {client for record in history for client in record.chosen}
    evaluated = any(record.final_model_metric is not None for record in history)
    clients = max((record.clients for record in history), default=0) if evaluated else 0
    return {
        "bytes_base": base,
        "bytes_provisioned": base * len(selected),
        "bytes_provisioned_evaluation": base * max(clients - len(selected), 0),
    }


def _find_shadow_stops(done: list[RoundRecord]) -> dict[str, int]:
    """For every psi of the paper's grid, the first round in which it would have stopped the run."""
    first: dict[str, int] = {}
    for h in done:
        for psi in h.diagnostics.shadow:
            first.setdefault(f"{psi:g}", h.t)
    return first
