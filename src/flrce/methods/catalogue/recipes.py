"""Every method on one screen: each is a composition of pieces, most of them FedAvg with another
answer or two.

frugal.py has the default. Here are FLrce, and the savings that its paper compares it with or that
go with it: fewer bits, epochs or weights. standard.py has FedAvg, which all start from, and what
the field made of it; savings.py others that save bytes or work; selection.py other choices of
clients and means that hold against attackers; lora.py methods for language models.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from flrce.core.pieces import Recipe
from flrce.core.roles import StopRule
from flrce.errors import BadInput, look_up_name, suggest_name
from flrce.methods.aggregation.fleet_clip import FleetClip
from flrce.methods.aggregation.mean import WeightedMean
from flrce.methods.catalogue.frugal import DENSE_BITS, frugal, make_stop
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
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.submodel.units import PrefixUnits, RandomUnits


def flrce(
    psi: float | str | None = None, preset: str = "paper", P: int = 10, **local: Any
) -> Recipe:
    """FLrce (Niu et al. 2024): clients that agree most with all others, a stop once those conflict.

    `paper` is Algorithm 1 as printed, `authors` their released code. `hardened` bounds what
    colluders can do to selection and stop (docs/robustness.md). psi is the threshold of the stop, a
    number of conflicting peers or a percentage of P; 50 % unless given.

    Presets of before `frugal` was the default mean what they meant (frugal without codes, clients
    grouped by their last updates): `default` or `balanced`, `accurate`, `frugal`, `wary`,
    `private`, `headway`, and `hardened` without a psi.
    """
    if preset in OLD_PRESETS and (preset != "hardened" or psi is None):
        return _build_old_preset(psi, preset, P, **local)
    if preset not in RELATIONSHIP_PRESETS:
        presets = dict.fromkeys((*RELATIONSHIP_PRESETS, *OLD_PRESETS))
        raise BadInput(f"recipe.preset = {preset!r}: {suggest_name(preset, presets)}")
    conflict = UpdateConflicts(resolve_conflict_threshold("50%" if psi is None else psi, P))
    base = replace(fedavg(P, **local), selector=RELATIONSHIP_PRESETS[preset], name="flrce")
    if preset == "hardened":
        conflict = replace(conflict, r=3, n=5, after=10, trusted=True, confirmed=True)
        return replace(base, aggregator=FleetClip(), stop=conflict)
    return replace(base, stop=conflict)


def _build_old_preset(psi: float | str | None, preset: str, P: int, **local: Any) -> Recipe:
    """What a preset of ours was made of while the recipe `flrce` had them: no codes."""
    modern, points = OLD_PRESETS[preset]
    made = frugal(modern, points, DENSE_BITS, DENSE_BITS, P=P, **local)
    made = replace(made, name="flrce")
    if preset == "hardened":
        return replace(made, aggregator=FleetClip())
    if preset == "private":
        if psi is not None:
            raise BadInput(
                "recipe.psi counts conflicts of single updates, preset = 'private' sees sums only;"
                " drop one"
            )
        return made
    made = replace(made, selector=RoundRobinSelector())
    if psi is None:
        return made
    if made.stop != MarginalGain():
        raise BadInput(f"recipe.psi and recipe.preset = {preset!r} set two stop rules; drop one")
    return replace(made, stop=UpdateConflicts(resolve_conflict_threshold(psi, P)), holdouts=False)


def flrce_no_stop(preset: str = "paper", P: int = 10, **local: Any) -> Recipe:
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


#: how the published method selects: Algorithm 1 as printed, the released code, and so bounded that
#: colluders hardly capture it (research/docs/departures.md, docs/robustness.md)
RELATIONSHIP_PRESETS = {
    "paper": RelationshipSelector(anchor="origin"),
    "authors": RelationshipSelector(anchor="model", blend=0.9, space="wire"),
    "hardened": RelationshipSelector(anchor="origin", floor=0.2, most=1.5, window=10),
}

#: presets of ours that `flrce` had: as which preset of `frugal`, and at which price
OLD_PRESETS: dict[str, tuple[str, float | None]] = {
    "default": ("default", None),
    "balanced": ("default", None),
    "accurate": ("accurate", None),
    "frugal": ("default", 4.0),
    "wary": ("wary", None),
    "hardened": ("hardened", None),
    "private": ("private", None),
    "headway": ("headway", None),
}

#: the stop rules of these presets, to be replayed
STOP_PRESETS: dict[str, StopRule] = {
    name: make_stop(*modern) for name, modern in OLD_PRESETS.items()
}

CATALOGUE: dict[str, Callable[..., Recipe]] = {
    "frugal": frugal,
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
    except (TypeError, ValueError):
        raise BadInput(
            f"psi must be a number or a percentage of P such as '50%', got {psi!r}"
        ) from None
    if not value > 0 or (isinstance(psi, str) and value > P):
        raise BadInput(f"psi must be above 0 and at most 100 % of P, got {psi!r}")
    if value > max(P - 1, 1):
        raise BadInput(
            f"psi must be above 0 and at most P - 1 = {P - 1}, got {value:g}: a client has only"
            f" {P - 1} peers, so training would never stop early"
        )
    return value
