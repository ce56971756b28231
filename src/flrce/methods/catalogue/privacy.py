"""Methods with differential privacy; docs/privacy.md says what they protect."""

from dataclasses import replace
from typing import Any

from flrce.core.pieces import Recipe
from flrce.methods.aggregation.private_mean import PrivateMean
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.selection.poisson import PoissonSelector
from flrce.models.flat import ANY_NORMS_KEYWORD


def dp_fedavg(
    noise: float = 1.0,
    clip: float = 1.0,
    quantile: float | None = None,
    clip_rate: float = 0.2,
    delta: float = 1e-5,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """DP-FedAvg (McMahan et al. 2018): clients drawn with chance P / M, clipped updates, a sum with
    noise.

    `quantile` lets the clipping length follow the updates' lengths (Andrew et al. 2021). Epsilon at
    `delta` is reported in every round; `stop = "privacy-budget"` ends the run by it.
    Normalisation layers stay with their clients, as statistics cannot be clipped.
    """
    return replace(
        fedavg(P, **local),
        selector=PoissonSelector(),
        aggregator=PrivateMean(noise, clip, quantile, clip_rate, delta),
        personal=(ANY_NORMS_KEYWORD,),
        minimum=0,
        name="dp-fedavg",
    )
