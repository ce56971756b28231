"""Federated learning that counts every joule and byte: FLrce and its peers as recipes of pieces.

>>> import flrce
>>> result = flrce.run(flrce.Experiment(rounds=2, clients=10, per_round=2))
>>> sorted(result.summary)[:2]
['accuracy', 'accuracy_last']

The names here are what an experiment, a reader of runs and the author of a piece need. They are
stable within a minor version; modules below the package may move.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flrce.version import __version__

if TYPE_CHECKING:
    from flrce.config.experiment import Experiment
    from flrce.core.engine import Engine
    from flrce.core.pieces import Recipe
    from flrce.core.roles import (
        Aggregator,
        Compressor,
        Downlink,
        LocalTrainer,
        Pace,
        Piece,
        RoundView,
        Selector,
        ServerAverage,
        ServerStep,
        StopRule,
        SubModel,
    )
    from flrce.core.types import (
        ClientCost,
        Evaluation,
        LocalWork,
        Payload,
        Reply,
        Round,
        RoundEvent,
        RoundRecord,
        Selection,
        State,
        Task,
        Updates,
    )
    from flrce.data.sources import Source
    from flrce.devices.cost_models import ClientLoad, CostModel
    from flrce.errors import BadInput, Diverged, UnfinishedRun
    from flrce.inference.predictions import Predictions
    from flrce.inference.trained_model import TrainedModel, load
    from flrce.methods.catalogue import recipes
    from flrce.report.results import RunResults, read_results
    from flrce.simulation.result import Result
    from flrce.simulation.runs import rounds, run
    from flrce.training.links import Batch, ClientContext, Link

__all__ = [
    "Aggregator",
    "BadInput",
    "Batch",
    "ClientContext",
    "ClientCost",
    "ClientLoad",
    "Compressor",
    "CostModel",
    "Diverged",
    "Downlink",
    "Engine",
    "Evaluation",
    "Experiment",
    "Link",
    "LocalTrainer",
    "LocalWork",
    "Pace",
    "Payload",
    "Piece",
    "Predictions",
    "Recipe",
    "Reply",
    "Result",
    "Round",
    "RoundEvent",
    "RoundRecord",
    "RoundView",
    "RunResults",
    "Selection",
    "Selector",
    "ServerAverage",
    "ServerStep",
    "Source",
    "State",
    "StopRule",
    "SubModel",
    "Task",
    "TrainedModel",
    "UnfinishedRun",
    "Updates",
    "__version__",
    "load",
    "read_results",
    "recipes",
    "rounds",
    "run",
]

#: module -> its public names, which load on first use
_HOMES = {
    "flrce.methods.catalogue": ("recipes",),
    "flrce.config.experiment": ("Experiment",),
    "flrce.core.engine": ("Engine",),
    "flrce.core.pieces": ("Recipe",),
    "flrce.core.roles": (
        "Aggregator",
        "Compressor",
        "Downlink",
        "LocalTrainer",
        "Pace",
        "Piece",
        "RoundView",
        "Selector",
        "ServerAverage",
        "ServerStep",
        "StopRule",
        "SubModel",
    ),
    "flrce.core.types": (
        "ClientCost",
        "Evaluation",
        "LocalWork",
        "Payload",
        "Reply",
        "Round",
        "RoundEvent",
        "RoundRecord",
        "Selection",
        "State",
        "Task",
        "Updates",
    ),
    "flrce.data.sources": ("Source",),
    "flrce.devices.cost_models": ("ClientLoad", "CostModel"),
    "flrce.errors": ("BadInput", "Diverged", "UnfinishedRun"),
    "flrce.inference.predictions": ("Predictions",),
    "flrce.inference.trained_model": ("TrainedModel", "load"),
    "flrce.report.results": ("RunResults", "read_results"),
    "flrce.simulation.result": ("Result",),
    "flrce.simulation.runs": ("rounds", "run"),
    "flrce.training.links": ("Batch", "ClientContext", "Link"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that importing one corner does not import all."""
    if name not in _MODULES:
        raise AttributeError(f"module 'flrce' has no attribute {name!r}")
    if name == "recipes":
        return import_module("flrce.methods.catalogue.recipes")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
