"""Every method on one screen: each is a composition of pieces."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flrce.aggregators.mean import WeightedMean
from flrce.averages import EMA, TailMean
from flrce.errors import BadInput, nearest
from flrce.local.workload import SGD
from flrce.pieces import Dense, Full, Last, Never, Recipe
from flrce.selectors.relationship import ByRelationship
from flrce.selectors.uniform import Uniform
from flrce.stops.budget import Budget, Patience
from flrce.stops.conflict import Conflicts


def fedavg(P: int = 10, epochs: int = 5, batch: int = 128, lr: float = 0.1) -> Recipe:
    """Federated averaging (McMahan et al. 2017): P at random, E epochs, weighted mean."""
    return Recipe(P, selector=Uniform(), trainer=SGD(epochs, batch, lr), aggregator=WeightedMean(), name="fedavg")


def flrce(psi: float | str = "50%", preset: str = "default", P: int = 10, **local: Any) -> Recipe:
    """FLrce (Niu et al. 2024): relationship-based selection, stop once the chosen clients conflict."""
    if preset not in SELECTIONS:
        raise BadInput(f"recipe.preset = {preset!r}: {nearest(preset, SELECTIONS)}")
    return replace(fedavg(P, **local), selector=SELECTIONS[preset], stop=Conflicts(threshold(psi, P)), name="flrce")


def flrce_no_stop(preset: str = "default", P: int = 10, **local: Any) -> Recipe:
    """FLrce without early stopping (the paper's ablation)."""
    return replace(flrce(preset=preset, P=P, **local), stop=fedavg().stop, name="flrce-no-stop")


#: how each preset selects: `paper` is Algorithm 1 as printed, `authors` the released code (docs/notation.md)
SELECTIONS = {
    "paper": ByRelationship(anchor="origin"),
    "default": ByRelationship(anchor="origin"),
    "authors": ByRelationship(anchor="model", blend=0.9, space="wire"),
}

CATALOGUE: dict[str, Callable[..., Recipe]] = {
    "fedavg": fedavg,
    "flrce": flrce,
    "flrce-no-stop": flrce_no_stop,
}


#: every piece by role and short name, for experiment files
PIECES: dict[str, dict[str, Callable[..., Any]]] = {
    "selector": {"uniform": Uniform, "relationship": ByRelationship},
    "trainer": {"sgd": SGD},
    "submodel": {"full": Full},
    "compressor": {"dense": Dense},
    "aggregator": {"mean": WeightedMean},
    "stop": {"never": Never, "conflicts": Conflicts, "budget": Budget, "patience": Patience},
    "average": {"last": Last, "ema": EMA, "tail": TailMean},
}


def threshold(psi: float | str, P: int) -> float:
    """psi as a mean number of conflicting peers, from a number or a percentage of P."""
    try:
        value = float(psi.removesuffix("%")) / 100 * P if isinstance(psi, str) else float(psi)
    except ValueError:
        raise BadInput(f"psi must be a number or a percentage of P such as '50%', got {psi!r}") from None
    if not 0 < value <= max(P - 1, 1):
        raise BadInput(
            f"psi must be above 0 and at most P - 1 = {P - 1}, got {value:g}: a client has only {P - 1} peers, "
            "so training would never stop early"
        )
    return value
