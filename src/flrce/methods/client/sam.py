"""FedSAM (Qu et al. 2022; Caldarola et al. 2022): clients descend where the loss is worst nearby
(SAM).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flrce.core.bounds import PositiveFloat
from flrce.training.links import Batch, Link, Tensors


@dataclass(frozen=True)
class SharpnessAwareGradient(Link):
    """The gradient at w + rho g / |g| on the same batch instead of that at w (Foret et al. 2021).

    What links before it added to g stays.
    """

    rho: PositiveFloat = 0.05
    extra_passes: ClassVar[float] = 1.0

    def probe(self, g: Tensor, w: Tensor, state: Tensors, batch: Batch) -> tuple[Tensor, Tensors]:
        plain = batch.g
        length = plain.norm().clamp(min=torch.finfo(plain.dtype).tiny)
        there = batch.gradient_at(w + self.rho * plain / length)
        return there + (g - plain), state
