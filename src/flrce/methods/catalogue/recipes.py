"""Every method on one screen: each is a composition of pieces, most of them FedAvg with another
answer or two.

Here are FLrce, and the savings that its paper compares it with or that go with it: fewer bits,
epochs or weights. standard.py has FedAvg, which all start from, and what the field made of it;
savings.py others that save bytes or work; selection.py other choices of clients and means that
hold against attackers; lora.py methods for language models.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from flrce.core.pieces import Recipe
from flrce.core.roles import StopRule
from flrce.errors import BadInput, look_up_name, suggest_name
from flrce.methods.aggregation.fleet_clip import FleetClip
from flrce.methods.aggregation.mean import DEFAULT_SAMPLE_CAP_RATIO, WeightedMean
from flrce.methods.aggregation.related_mean import RelatedMean
from flrce.methods.catalogue.lora import *  # noqa: F403
from flrce.methods.catalogue.lora import LORA_RECIPES
from flrce.methods.catalogue.privacy import dp_fedavg
from flrce.methods.catalogue.savings import *  # noqa: F403
from flrce.methods.catalogue.savings import SAVINGS_RECIPES
from flrce.methods.catalogue.selection import *  # noqa: F403
from flrce.methods.catalogue.selection import SELECTION_AND_ROBUST_RECIPES
from flrce.methods.catalogue.standard import *  # noqa: F403 - so that recipes.scaffold is one of them
from flrce.methods.catalogue.standard import STANDARD_RECIPES, fedavg
from flrce.methods.client.fedcom import CorrectedTraining
from flrce.methods.client.workload import DeadlineTraining, FrozenBlocksTraining, ProximalTraining
from flrce.methods.compression.error_feedback import ErrorFeedback
from flrce.methods.compression.quantize import Quantizer
from flrce.methods.compression.sparsify import TopK
from flrce.methods.selection.relationship import RelationshipSelector
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.server.averages import FLRCE_EMA
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.stopping.no_headway import NoHeadway
from flrce.methods.submodel.units import PrefixUnits, RandomUnits


def flrce(
    psi: float | str | None = None, preset: str = "default", P: int = 10, **local: Any
) -> Recipe:
    """FLrce: everyone in turn, grouped by their last updates; stops once more rounds are not worth
    it (docs/concepts.md).

    It hands back the averaged model and believes no client's samples beyond 5 times the round's
    median. The price is 2 points for twice the rounds; `frugal` asks for 4, `accurate` for 1,
    `headway` is the stop of version 0.1, and with a psi the paper's rule decides. `wary` counts
    clients to whom nobody relates less: wrong labels, noise, free-riders (docs/robustness.md).
    `paper` is Niu et al. 2024: clients that agree most with all, a stop once the chosen conflict.
    `authors`: their released code. `hardened`: turns by chance, which nobody captures, and
    fleet-clip (docs/robustness.md: what falls); with a psi the paper's selection and stop, bounded.
    `private`: what needs sums only, as under secure aggregation.
    """
    base = replace(fedavg(P, **local), name="flrce")
    conflict = UpdateConflicts(resolve_conflict_threshold("50%" if psi is None else psi, P))
    if preset in ("paper", "authors"):
        return replace(base, selector=RELATIONSHIP_PRESETS[preset], stop=conflict)
    if preset == "hardened" and psi is not None:
        bounded = replace(conflict, r=3, n=5, after=10, trusted=True, confirmed=True)
        return replace(
            base, selector=RELATIONSHIP_PRESETS[preset], aggregator=FleetClip(), stop=bounded
        )

    ours = replace(base, stop=MarginalGain(), average=FLRCE_EMA, holdouts=True)
    if preset == "hardened":
        return replace(ours, selector=RoundRobinSelector(by="chance"), aggregator=FleetClip())
    if preset == "private":
        if psi is not None:
            raise BadInput(
                "recipe.psi counts conflicts of single updates, preset = 'private' sees sums only;"
                " drop one"
            )
        return replace(ours, selector=RoundRobinSelector(by="chance"), sums=True)
    if preset not in STOP_PRESETS:
        raise BadInput(
            f"recipe.preset = {preset!r}:"
            f" {suggest_name(preset, (*STOP_PRESETS, *RELATIONSHIP_PRESETS, 'private'))}"
        )
    if psi is not None and STOP_PRESETS[preset] != STOP_PRESETS["default"]:
        raise BadInput(f"recipe.psi and recipe.preset = {preset!r} set two stop rules; drop one")
    stop = STOP_PRESETS[preset] if psi is None else conflict
    mean = (
        RelatedMean(cap=DEFAULT_SAMPLE_CAP_RATIO)
        if preset == "wary"
        else WeightedMean(cap=DEFAULT_SAMPLE_CAP_RATIO)
    )
    return replace(
        ours,
        selector=RoundRobinSelector(),
        aggregator=mean,
        stop=stop,
        holdouts=isinstance(stop, MarginalGain),
    )


def flrce_no_stop(preset: str = "default", P: int = 10, **local: Any) -> Recipe:
    """FLrce without early stopping (the paper's ablation)."""
    return replace(flrce(preset=preset, P=P, **local), stop=fedavg().stop, name="flrce-no-stop")


def fedcom(
    keep: float = 0.6, preset: str = "paper", feedback: bool = False, P: int = 10, **local: Any
) -> Recipe:
    """Fedcom as FLrce runs it: FedAvg with only the largest 60 % of each update; no error feedback
    unless asked for.

    `authors` averages updates without weights, as their released code does.
    """
    weighing: dict[str, Literal["samples", "equal"]] = {"paper": "samples", "authors": "equal"}
    mean = WeightedMean(by=look_up_name(preset, weighing, "recipe.preset"))
    compressor = ErrorFeedback(TopK(keep)) if feedback else TopK(keep)
    return replace(fedavg(P, **local), compressor=compressor, aggregator=mean, name="fedcom")


def fedcom_quantised(
    bits: int = 8, stochastic: bool = True, rate: float = 1.0, P: int = 10, **local: Any
) -> Recipe:
    """FedCOM (Haddadpour et al. 2021): quantised updates, equal weights, a server step of its
    own.
    """
    mean = WeightedMean(rate, "equal")
    return replace(
        fedavg(P, **local),
        compressor=Quantizer(bits, stochastic),
        aggregator=mean,
        name="fedcom-quantised",
    )


def fedcomgate(
    bits: int = 8, stochastic: bool = True, rate: float = 1.0, P: int = 10, **local: Any
) -> Recipe:
    """FedCOMGATE (Haddadpour et al. 2021): FedCOM with local gradients corrected for their client's
    drift.
    """
    base = fedcom_quantised(bits, stochastic, rate, P, **local)
    return replace(base, trainer=CorrectedTraining(base.update.lr, rate), name="fedcomgate")


def fedprox(
    mu: float | None = None,
    preset: str = "default",
    epochs_from: Sequence[int] | None = None,
    stragglers: float = 0.0,
    P: int = 10,
    epochs: int = 5,
    **local: Any,
) -> Recipe:
    """FedProx (Li et al. 2020): a pull towards w, and uneven epochs (for E = 5: 3, 4 or 5).

    mu is .01 unless given. `authors` is FLrce's released code: the norm unsquared, mu = .05 for
    CIFAR10 (give .1 for CIFAR100, .5 for the others).
    """
    squared = look_up_name(preset, {"default": True, "authors": False}, "recipe.preset")
    mu = (0.01 if squared else 0.05) if mu is None else mu
    if epochs_from is None:
        epochs_from = range((3 * epochs + 4) // 5, epochs + 1)  # from three fifths of E, rounded up
    trainer = ProximalTraining(mu, tuple(epochs_from), squared, stragglers)
    return replace(fedavg(P, epochs, **local), trainer=trainer, name="fedprox")


def dropout(rate: float = 0.75, fill: bool = False, P: int = 10, **local: Any) -> Recipe:
    """Federated Dropout (Caldas et al. 2018): each client trains a random sub-model; mean over
    those who hold a weight.

    `fill` lets the others vote for the old value (Wen et al. 2022).
    """
    return replace(
        fedavg(P, **local),
        submodel=RandomUnits(rate),
        aggregator=WeightedMean(fill=fill),
        name="dropout",
    )


def heterofl(rates: Sequence[float] | None = None, P: int = 10, **local: Any) -> Recipe:
    """HeteroFL (Diao et al. 2021): nested sub-models, one of several widths for each client (1,
    1/2, ... 1/16).

    Each weight is the plain mean over those who hold it.
    """
    widths = PrefixUnits(rates=(1.0, 0.5, 0.25, 0.125, 0.0625) if rates is None else tuple(rates))
    return replace(
        fedavg(P, **local), submodel=widths, aggregator=WeightedMean(by="equal"), name="heterofl"
    )


def timelyfl(
    share: float = 0.5,
    preset: str = "default",
    grace: float = 0.0,
    P: int = 10,
    epochs: int = 5,
    **local: Any,
) -> Recipe:
    """TimelyFL (Zhang et al. 2023): a deadline from the faster half; the rest train fewer epochs,
    or fewer blocks.

    `default` never goes beyond E epochs, as FLrce describes it; `original` plans with one and lets
    the fast do more. Replies later than the deadline by more than the share `grace` of it are
    refused.
    """
    clip = look_up_name(preset, {"default": True, "original": False}, "recipe.preset")
    base = fedavg(P, epochs if clip else 1, **local)
    return replace(base, trainer=DeadlineTraining(share, clip, grace), name="timelyfl")


def flrce_topk(
    psi: float | str | None = None,
    keep: float = 0.3,
    feedback: bool = True,
    preset: str = "default",
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FLrce with sparse uploads: what is left out is added to a client's next update."""
    compressor = ErrorFeedback(TopK(keep)) if feedback else TopK(keep)
    return replace(flrce(psi, preset, P, **local), compressor=compressor, name="flrce-topk")


def flrce_dropout(
    psi: float | str | None = None,
    rate: float = 0.75,
    preset: str = "default",
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FLrce with random sub-models; where a client holds no weight, its update counts as zero in
    comparisons.
    """
    return replace(flrce(psi, preset, P, **local), submodel=RandomUnits(rate), name="flrce-dropout")


def flrce_freeze(
    psi: float | str | None = None,
    first: int = 1,
    seconds: float = 0.0,
    preset: str = "default",
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FLrce with the first blocks frozen: for all, or for devices that would need longer than
    `seconds`.
    """
    base = flrce(psi, preset, P, **local)
    return replace(base, trainer=FrozenBlocksTraining(first, seconds), name="flrce-freeze")


#: how the published method selects: Algorithm 1 as printed, the released code (docs/notation.md),
#: and so bounded that colluders hardly capture it (docs/robustness.md)
RELATIONSHIP_PRESETS = {
    "paper": RelationshipSelector(anchor="origin"),
    "authors": RelationshipSelector(anchor="model", blend=0.9, space="wire"),
    "hardened": RelationshipSelector(anchor="origin", floor=0.2, most=1.5, window=10),
}

#: when ours stops: prices in points that twice the rounds must bring; `headway` is the stop of
#: version 0.1
STOP_PRESETS: dict[str, StopRule] = {
    **dict.fromkeys(("default", "balanced", "wary"), MarginalGain()),
    "frugal": MarginalGain(points=4.0),
    "accurate": MarginalGain(points=1.0),
    "headway": NoHeadway(),
}

CATALOGUE: dict[str, Callable[..., Recipe]] = {
    "fedavg": fedavg,
    "flrce": flrce,
    "flrce-no-stop": flrce_no_stop,
    **SELECTION_AND_ROBUST_RECIPES,
    "fedcom": fedcom,
    "fedcom-quantised": fedcom_quantised,
    "fedcomgate": fedcomgate,
    "fedprox": fedprox,
    "dropout": dropout,
    "heterofl": heterofl,
    "timelyfl": timelyfl,
    "flrce-topk": flrce_topk,
    "flrce-dropout": flrce_dropout,
    "flrce-freeze": flrce_freeze,
    **SAVINGS_RECIPES,
    **STANDARD_RECIPES,
    "dp-fedavg": dp_fedavg,
    **LORA_RECIPES,
}


def summarize_recipe(name: str) -> str:
    """The first paragraph of what a recipe says of itself, on one line."""
    return " ".join((CATALOGUE[name].__doc__ or "").split("\n\n")[0].split())


def resolve_conflict_threshold(psi: float | str, P: int) -> float:
    """psi as a mean number of conflicting peers, from a number or a percentage of P."""
    try:
        value = float(psi.removesuffix("%")) / 100 * P if isinstance(psi, str) else float(psi)
    except ValueError:
        raise BadInput(
            f"psi must be a number or a percentage of P such as '50%', got {psi!r}"
        ) from None
    if not 0 < value <= max(P - 1, 1):
        raise BadInput(
            f"psi must be above 0 and at most P - 1 = {P - 1}, got {value:g}: a client has only"
            f" {P - 1} peers, so training would never stop early"
        )
    return value
