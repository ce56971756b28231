"""Methods that fine-tune language models by adapters: what trains is small, and only that travels.

Each is a composition like all others; with `guided`, FLrce chooses the clients, averages the models
and stops the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flrce.core.bounds import PositiveFloat
from flrce.core.pieces import Recipe
from flrce.errors import BadInput
from flrce.methods.aggregation.lora_products import LoRAProductMean
from flrce.methods.aggregation.mean import DEFAULT_SAMPLE_CAP_RATIO, WeightedMean
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.client.fedkseed import ZerothOrderTraining
from flrce.methods.compression.nonzero import NonzeroCoordinates
from flrce.methods.selection.turns import RoundRobinSelector
from flrce.methods.server.averages import FLRCE_EMA
from flrce.methods.stopping.marginal_gain import MarginalGain
from flrce.methods.submodel.units import PrefixUnits

LORA_A_PATTERN = "*.lora_A*"  # also as peft names it


def fedit(
    guided: bool = False, points: PositiveFloat | None = None, P: int = 10, **local: Any
) -> Recipe:
    """FedIT (Zhang et al. 2024): FedAvg over both matrices of LoRA adapters."""
    return replace(_apply_flrce_guidance(fedavg(P, **local), guided, points), name="fedit")


def ffa_lora(
    guided: bool = False, points: PositiveFloat | None = None, P: int = 10, **local: Any
) -> Recipe:
    """FFA-LoRA (Sun et al. 2024): A stays as it was drawn, B alone trains and travels, so that
    means are exact.
    """
    return replace(
        _apply_flrce_guidance(fedavg(P, **local), guided, points),
        frozen=(LORA_A_PATTERN,),
        name="ffa-lora",
    )


def flexlora(
    rates: Sequence[float] = (1.0,),
    guided: bool = False,
    points: PositiveFloat | None = None,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FlexLoRA (Bai et al. 2024): products of adapters averaged, then cut to the rank that travels.

    `rates` are the shares of the model's rank that clients have: one for all, or each client one of
    several.
    """
    shares = tuple(map(float, rates))
    if not shares:
        raise BadInput(
            "rates is empty; give a share of the rank for everybody, such as [1.0], or several"
        )
    mean = LoRAProductMean(cap=DEFAULT_SAMPLE_CAP_RATIO if guided else 0.0)
    base = replace(
        _apply_flrce_guidance(fedavg(P, **local), guided, points), aggregator=mean, name="flexlora"
    )
    return replace(base, submodel=PrefixUnits(rates=shares)) if set(shares) != {1.0} else base


def fedkseed(
    eps: float = 1e-3,
    directions: int = 1,
    guided: bool = False,
    points: PositiveFloat | None = None,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """FedKSeed (Qin et al. 2024): clients probe random directions and send how far to go along
    each, in 6 bytes.

    The model is a few numbers, one a direction: set model.options.seeds. No backward pass, so
    memory is inference's.
    """
    base = _apply_flrce_guidance(fedavg(P, **local), guided, points)
    return replace(
        base,
        trainer=ZerothOrderTraining(eps, directions),
        compressor=NonzeroCoordinates(),
        name="fedkseed",
    )


def _apply_flrce_guidance(base: Recipe, guided: bool, points: float | None) -> Recipe:
    """The same under FLrce's lead: its selection, average and stop, at a price in points for twice
    the rounds (2).
    """
    if points is not None and not guided:
        raise BadInput(
            f"points = {points:g} is the price of FLrce's stop: set guided = true, or drop points"
        )
    if not guided:
        return base
    led = replace(
        base,
        selector=RoundRobinSelector(),
        aggregator=WeightedMean(cap=DEFAULT_SAMPLE_CAP_RATIO),
        average=FLRCE_EMA,
    )
    return replace(
        led, stop=MarginalGain() if points is None else MarginalGain(points), holdouts=True
    )


LORA_RECIPES: dict[str, Callable[..., Recipe]] = {
    "fedit": fedit,
    "ffa-lora": ffa_lora,
    "flexlora": flexlora,
    "fedkseed": fedkseed,
}
