"""Clean electricity in the manner of FedZero (Wiesner et al., e-Energy 2024).

Reconstructed from the abstract and the README; not verified against the authors' code (README.md
beside this file). It combines two pieces of flrce, so that an experiment file needs no module:

    rounds = 4
    clients = 12
    per_round = 4
    [recipe]
    base = "fedavg"
    name = "fedclean"
    selector = { piece = "cleanest", share = 0.5 }
    pace = { piece = "clean-hours", share = 0.25, within = 43200.0 }
"""

from dataclasses import replace
from typing import Any

from flrce.core.pieces import Recipe
from flrce.methods.catalogue.recipes import fedavg
from flrce.methods.pacing.clean_hours import CleanHours
from flrce.methods.selection.cleanest import LowCarbonSelector


def fedclean(
    share: float = 0.5, hours: float = 0.25, within: float = 43200.0, P: int = 10, **local: Any
) -> Recipe:
    """FedAvg among the `share` of clients with the least carbon intensity, in the cleanest share
    `hours` of the next day, at most `within` seconds later.
    """
    base = replace(fedavg(P, **local), selector=LowCarbonSelector(share))
    return replace(base, pace=CleanHours(hours, within), name="fedclean")
