"""flrce for Flower's users: strategies for a ServerApp that exists already, and the client's side.

from flrce.flower import FLrce
strategy = FLrce(fraction_train=0.5, psi="50%", state="runs/a")
result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)
"""

from importlib import import_module
from typing import Any

from flrce.errors import BadInput

__all__ = [
    "FLrce", "Guarded", "Local", "LocalGrid", "RecipeStrategy", "Result", "client_app", "compressing", "introduce",
    "should_stop",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names load on first use: Flower is an extra, and not every corner of this package needs it."""
    if name not in __all__:
        raise AttributeError(f"module 'flrce.flower' has no attribute {name!r}")
    try:
        return getattr(import_module("flrce.flower.strategies"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "flwr":
            raise
        raise BadInput(f"flrce.flower needs Flower ({missing}); install flrce[flower]") from missing
