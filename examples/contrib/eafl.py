"""EAFL (Arouj and Abdelmoniem 2022): Oort that prefers full batteries.

Reconstructed from the abstract; not verified against the authors' code (README.md beside this
file). Oort's selector has the weight `power` of batteries, so that an experiment file needs no
module:

    rounds = 4
    clients = 12
    per_round = 4
    [recipe]
    base = "fedavg"
    name = "eafl"
    selector = { piece = "utility", power = 0.75 }
    aggregator = { piece = "mean", by = "equal" }
    [fleet]
    profile = "phone"
    battery = "phone"
"""

from dataclasses import replace
from typing import Any

from flrce.core.pieces import Recipe
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.catalogue.recipes import fedavg
from flrce.methods.selection.utility import UtilitySelector


def eafl(power: float = 0.75, P: int = 10, **local: Any) -> Recipe:
    """Oort's selection in which batteries weigh `power`."""
    base = replace(fedavg(P, **local), aggregator=WeightedMean(by="equal"))
    return replace(base, selector=UtilitySelector(power=power), name="eafl")
