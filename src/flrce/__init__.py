"""Federated learning that counts every joule and byte: FLrce and its peers as recipes of small
pieces.

>>> import flrce
>>> result = flrce.run(flrce.Experiment(rounds=2, clients=10, per_round=2))
>>> sorted(result.summary)[:2]
['accuracy', 'accuracy_last']
"""

from typing import Any

from flrce.version import __version__

__all__ = [
    "BadInput",
    "Diverged",
    "Experiment",
    "Recipe",
    "Result",
    "Source",
    "UnfinishedRun",
    "__version__",
    "recipes",
    "rounds",
    "run",
]

_HOMES = {
    "BadInput": "flrce.errors",
    "Diverged": "flrce.errors",
    "UnfinishedRun": "flrce.errors",
    "Experiment": "flrce.config.experiment",
    "Recipe": "flrce.core.pieces",
    "Result": "flrce.simulation.runs",
    "Source": "flrce.data.sources",
    "rounds": "flrce.simulation.runs",
    "run": "flrce.simulation.runs",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that importing one corner does not import all."""
    from importlib import import_module

    if name == "recipes":
        return import_module("flrce.methods.catalogue.recipes")
    if name not in _HOMES:
        raise AttributeError(f"module 'flrce' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
