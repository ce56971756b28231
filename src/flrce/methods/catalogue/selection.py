"""FLrce's rivals: other ways to choose clients, and means that bad updates cannot steer. All begin
with FedAvg.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from flrce.core.pieces import Recipe
from flrce.errors import BadInput, look_up_name, suggest_name
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.aggregation.robust import ClippedMean, CoordinateMedian, Krum, TrimmedMean
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.client.pyramidfl import FewerEpochs, PyramidTraining
from flrce.methods.compression.tensors import TensorDropout
from flrce.methods.selection.clustered import ClusteredSampling
from flrce.methods.selection.diverse import DivFL
from flrce.methods.selection.power_of_choice import PowerOfChoice
from flrce.methods.selection.tiers import TIER_POLICIES, AdaptiveTierSelector, TierSelector
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.selection.utility import UtilitySelector


def oort(
    overcommit: float = 1.1, percentile: float = 10.0, blacklist: int = 0, P: int = 10, **local: Any
) -> Recipe:
    """Oort (Lai et al. 2021): clients with large losses that are fast enough, some unseen ones,
    spares asked along.

    Replies count alike, as in its released code. A client asked more than `blacklist` times (0: no
    limit) is no longer chosen.
    """
    selector = UtilitySelector(overcommit=overcommit, percentile=percentile, blacklist=blacklist)
    return replace(
        fedavg(P, **local), selector=selector, aggregator=WeightedMean(by="equal"), name="oort"
    )


def pyramidfl(
    preset: str = "original", overcommit: float = 1.3, P: int = 10, **local: Any
) -> Recipe:
    """PyramidFL (Li et al. 2022): Oort's selection; fast clients train longer, unimportant ones
    upload less.

    `flrce` is the method as FLrce's authors describe it: slow clients train fewer epochs and
    everyone uploads all.
    """
    selector = UtilitySelector(overcommit=overcommit)
    if preset == "original":
        return replace(
            fedavg(P, **local),
            selector=selector,
            trainer=PyramidTraining(),
            compressor=TensorDropout(0.0),
            aggregator=WeightedMean(by="equal"),
            name="pyramidfl",
        )
    if preset == "flrce":
        return replace(
            fedavg(P, **local), selector=selector, trainer=FewerEpochs(), name="pyramidfl"
        )
    raise BadInput(f"recipe.preset = {preset!r}: {suggest_name(preset, ('original', 'flrce'))}")


def power_of_choice(candidates: int = 0, stale: bool = False, P: int = 10, **local: Any) -> Recipe:
    """Power-of-Choice (Cho et al. 2020): of some candidates, those with the largest loss; 0
    candidates: twice P.

    Candidates are drawn in proportion to their samples, so replies count alike.
    """
    selector = PowerOfChoice(candidates, stale)
    return replace(
        fedavg(P, **local),
        selector=selector,
        aggregator=WeightedMean(by="equal"),
        name="power-of-choice",
    )


def clustered_sampling(by: str = "similarity", P: int = 10, **local: Any) -> Recipe:
    """Clustered sampling (Fraboni et al. 2021): one client of each of P urns, filled by
    "similarity" or by "size".
    """
    selector = ClusteredSampling(
        look_up_name(by, {"similarity": "similarity", "size": "size"}, "recipe.by")
    )
    return replace(
        fedavg(P, **local),
        selector=selector,
        aggregator=WeightedMean(by="equal"),
        name="clustered-sampling",
    )


def tifl(
    policy: str = "uniform", every: int | None = None, credits: int = 0, P: int = 10, **local: Any
) -> Recipe:
    """TiFL (Chai et al. 2020): five tiers by speed, one a round; policies uniform, random, fast,
    slow and adaptive.

    `adaptive` asks each tier for its loss every `every` rounds (10), and takes a tier `credits`
    times at most (0: any).
    """
    if policy == "adaptive":
        return replace(
            fedavg(P, **local),
            selector=AdaptiveTierSelector(every=10 if every is None else every, credits=credits),
            name="tifl",
        )
    if every is not None or credits:
        raise BadInput(
            "recipe.every and recipe.credits need recipe.policy = 'adaptive'; set that, or drop"
            " them"
        )
    odds = look_up_name(policy, {**TIER_POLICIES, "adaptive": ()}, "recipe.policy")
    return replace(fedavg(P, **local), selector=TierSelector(len(odds), odds), name="tifl")


def stratified_turns(P: int = 10, **local: Any) -> Recipe:
    """FedAvg with everyone in turn, one client of each size in every round."""
    return replace(
        fedavg(P, **local), selector=RoundRobinSelector(by="sizes"), name="stratified-turns"
    )


def divfl(P: int = 10, **local: Any) -> Recipe:
    """DivFL (Balakrishnan et al. 2022): P clients whose last updates stand for everyone's."""
    return replace(fedavg(P, **local), selector=DivFL(), name="divfl")


def trimmed_mean(share: float = 0.2, P: int = 10, **local: Any) -> Recipe:
    """FedAvg by trimmed means (Yin et al. 2018): holds against up to a share of attackers."""
    return replace(fedavg(P, **local), aggregator=TrimmedMean(share), name="trimmed-mean")


def median(P: int = 10, **local: Any) -> Recipe:
    """FedAvg by medians of each coordinate (Yin et al. 2018)."""
    return replace(fedavg(P, **local), aggregator=CoordinateMedian(), name="median")


def krum(attackers: int = 1, keep: int = 0, P: int = 10, **local: Any) -> Recipe:
    """FedAvg by Multi-Krum (Blanchard et al. 2017): only updates near their neighbours; keep 0: all
    but attackers.
    """
    return replace(
        fedavg(P, **local), aggregator=Krum(attackers, keep), minimum=2 * attackers + 3, name="krum"
    )


def clipped_mean(norm: float | Literal["median"] = "median", P: int = 10, **local: Any) -> Recipe:
    """FedAvg with updates clipped to a norm, or to the round's median one: no update dominates by
    its length.
    """
    return replace(fedavg(P, **local), aggregator=ClippedMean(norm), name="clipped-mean")


SELECTION_AND_ROBUST_RECIPES: dict[str, Callable[..., Recipe]] = {
    "oort": oort,
    "pyramidfl": pyramidfl,
    "power-of-choice": power_of_choice,
    "clustered-sampling": clustered_sampling,
    "tifl": tifl,
    "stratified-turns": stratified_turns,
    "divfl": divfl,
    "trimmed-mean": trimmed_mean,
    "median": median,
    "krum": krum,
    "clipped-mean": clipped_mean,
}
