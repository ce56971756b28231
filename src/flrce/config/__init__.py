"""The experiment file: TOML to checked settings, recipe, data, network and engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flrce.config.experiment import Experiment as Experiment


def __getattr__(name: str) -> Any:
    """`from flrce.config import Experiment`, as apps of earlier versions write it."""
    if name != "Experiment":
        raise AttributeError(f"module 'flrce.config' has no attribute {name!r}")
    from flrce.config.experiment import Experiment

    return Experiment
