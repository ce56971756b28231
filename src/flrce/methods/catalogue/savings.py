"""Fewer bytes or less work: codes that grow more precise, layers that are not sent or trained."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from flrce.core.pieces import Recipe
from flrce.methods.catalogue.standard import fedavg
from flrce.methods.client.ordered_freezing import OrderedFreezing
from flrce.methods.compression.entropy import EntropyCoded
from flrce.methods.compression.growing_bits import GrowingBits
from flrce.methods.compression.qsgd import FixedPointCode
from flrce.methods.compression.skipped_layers import SkippedLayers
from flrce.methods.server.recycled import RecycledUpdate


def dadaquant(
    levels: int = 1,
    most: int = 8,
    patience: int = 10,
    smoothing: float = 0.9,
    by_samples: bool = True,
    P: int = 10,
    **local: Any,
) -> Recipe:
    """DAdaQuant (Hoenig et al. 2021): quantised uploads whose levels double when the loss stops
    falling.

    With `by_samples`, clients with more samples get more levels. Use a `patience` of a tenth of the
    rounds, as the paper does.
    """
    code = EntropyCoded(FixedPointCode(levels))
    growing = GrowingBits(code, most, patience, smoothing, by_samples)
    return replace(fedavg(P, **local), compressor=growing, name="dadaquant")


def fedluar(layers: int = 2, P: int = 10, **local: Any) -> Recipe:
    """FedLUAR (Kim et al. 2025): the layers that move least are not uploaded; the server repeats
    their last update.
    """
    base = replace(fedavg(P, **local), compressor=SkippedLayers(layers))
    return replace(base, server=RecycledUpdate(), name="fedluar")


def fedolf(frozen: Sequence[int] = (0, 1, 2), P: int = 10, **local: Any) -> Recipe:
    """FedOLF (Niu et al. 2025): slower devices freeze more of the first layers.

    `frozen` has the number of frozen blocks for each group of devices, the fastest group first.
    """
    return replace(fedavg(P, **local), trainer=OrderedFreezing(tuple(frozen)), name="fedolf")


SAVINGS_RECIPES: dict[str, Callable[..., Recipe]] = {
    "dadaquant": dadaquant,
    "fedluar": fedluar,
    "fedolf": fedolf,
}
