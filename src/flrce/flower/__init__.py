"""flrce for Flower's users: strategies for a ServerApp that exists already, and the client's side.

from flrce.flower import FLrce
strategy = FLrce(fraction_train=0.5, psi="50%", state="runs/a")
result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)
"""

from importlib import import_module
from typing import Any

from flrce.errors import BadInput, installs

#: public name -> where it is
PLACES = {
    **dict.fromkeys(("FLrce", "Guarded", "RecipeStrategy"), "strategies"),
    **dict.fromkeys(("Local", "client_app", "compressing", "introduce"), "client"),
    **dict.fromkeys(("Masked", "masked_app"), "secure"),
    "LocalGrid": "grid", "Result": "session", "should_stop": "stopping",
}  # fmt: skip
__all__ = list(PLACES)
VERSIONS = "1.38 to 1.42"  # of Flower, with which the tests have passed


def __getattr__(name: str) -> Any:
    """Public names load on first use: Flower is an extra, and not every corner of this package needs it."""
    if name not in PLACES:
        raise AttributeError(f"module 'flrce.flower' has no attribute {name!r}")
    try:
        return getattr(import_module(f"flrce.flower.{PLACES[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "flwr":
            raise
        raise BadInput(f"flrce.flower needs Flower {VERSIONS} ({missing}); {installs('flower')}") from missing
