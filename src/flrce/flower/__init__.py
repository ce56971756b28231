"""flrce for Flower's users: strategies for a ServerApp that exists already, and the client's side.

from flrce.flower import FLrce
strategy = FLrce(fraction_train=0.5, psi="50%", state="runs/a")
result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)
"""

from importlib import import_module
from typing import Any

from flrce.errors import BadInput, format_install_command

#: public name -> where it is
PUBLIC_NAMES = {
    **dict.fromkeys(("FLrce", "RecipeStrategy"), "strategy"),
    "Guarded": "guarded",
    **dict.fromkeys(("Local", "client_app"), "client"),
    **dict.fromkeys(("compressing", "introduce"), "mods"),
    **dict.fromkeys(("Masked", "masked_app"), "secure"),
    "LocalGrid": "grid",
    "Result": "session",
    "should_stop": "stopping",
}
__all__ = list(PUBLIC_NAMES)
SUPPORTED_VERSIONS = "1.38 to 1.42"  # of Flower, with which the tests have passed


def __getattr__(name: str) -> Any:
    """Public names load on first use: Flower is an extra, and not every corner of this package
    needs it.
    """
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module 'flrce.flower' has no attribute {name!r}")
    try:
        return getattr(import_module(f"flrce.flower.{PUBLIC_NAMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] != "flwr":
            raise
        raise BadInput(
            f"flrce.flower needs Flower {SUPPORTED_VERSIONS} ({missing});"
            f" {format_install_command('flower')}"
        ) from missing
