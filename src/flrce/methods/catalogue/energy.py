"""Methods that mind energy: batteries, clean electricity, a budget of joules, what clients cost and
bring.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flrce.core.pieces import Recipe
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.pacing.clean_hours import CleanHours
from flrce.methods.selection.bandit import QLearning
from flrce.methods.selection.budgeted import EnergyBudgetSelector
from flrce.methods.selection.cleanest import LowCarbonSelector
from flrce.methods.selection.utility import UtilitySelector
from flrce.methods.stopping.budget import CostBudget


def eafl(power: float = 0.75, P: int = 10, **local: Any) -> Recipe:
    """EAFL (Arouj and Abdelmoniem 2022): Oort with an eye on batteries, which weigh `power`;
    recalled.
    """
    base = replace(fedavg(P, **local), aggregator=WeightedMean(by="equal"))
    return replace(base, selector=UtilitySelector(power=power), name="eafl")


def fedclean(
    share: float = 0.5, hours: float = 0.25, within: float = 43200.0, P: int = 10, **local: Any
) -> Recipe:
    """Where and when electricity is clean, in the manner of FedZero (Wiesner et al. 2024): among
    the `share` of clients with the least carbon intensity, in the cleanest share `hours` of the
    next day, `within` seconds at most.
    """
    base = replace(fedavg(P, **local), selector=LowCarbonSelector(share))
    return replace(base, pace=CleanHours(hours, within), name="fedclean")


def fedjoule(
    joules: float = 0.0, share: float = 0.5, slack: float = 0.1, P: int = 10, **local: Any
) -> Recipe:
    """FedJoule (Banerjee et al. 2025): the best clients that a budget of joules pays for, and of
    these the quickest.

    `joules` are for the whole run, which ends with them; 0: a round may take `share` of what P
    clients take on average. After the abstract: its integer programmes, values and settings are
    ours.
    """
    base = replace(
        fedavg(P, **local), selector=EnergyBudgetSelector(joules, share, slack), name="fedjoule"
    )
    return replace(base, stop=CostBudget(joules=joules)) if joules else base


def autofl(
    shares: Sequence[float] = (1.0, 0.6, 0.2),
    epsilon: float = 0.1,
    accuracy: float = 1.0,
    gain: float = 1.0,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """In the manner of AutoFL (Kim and Wu 2021): who trains, and which of the `shares` of the
    epochs, by Q-learning.

    Energy counts against the headline metric (`accuracy`) and its `gain`. Recalled; epochs in place
    of processors.
    """
    learner = QLearning(tuple(shares), epsilon, accuracy=accuracy, gain=gain)
    return replace(fedavg(P, **local), selector=learner, trainer=learner, name="autofl")


ENERGY_RECIPES: dict[str, Callable[..., Recipe]] = {
    "eafl": eafl,
    "fedclean": fedclean,
    "fedjoule": fedjoule,
    "autofl": autofl,
}
