"""Weighted means of updates. Sums run in float64 over replies in a fixed order, so no arrival order shows."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flrce.types import Updates


@dataclass(frozen=True)
class WeightedMean:
    """Eq. 4: w + rate * sum p_k u_k. Coordinates that only some clients hold are averaged over those that do.

    `by` weighs a client by its "samples" n_k, or all "equal"ly. A coordinate nobody holds keeps its bits. `fill` lets
    a client without a coordinate vote for its old value (Wen et al. 2022), so that rarely held ones move less.
    """

    rate: float = 1.0
    by: str = "samples"
    fill: bool = False

    def __call__(self, w: Tensor, updates: Updates, memory: Any) -> Tensor:
        n = updates.n if self.by == "samples" else torch.ones_like(updates.n)
        return step(w, replace(updates, covered=None) if self.fill else updates, n, self.rate)


def step(w: Tensor, updates: Updates, n: Tensor, rate: float = 1.0) -> Tensor:
    """w plus the n-weighted mean of the updates, over whoever covers a coordinate."""
    total = torch.zeros_like(w, dtype=torch.float64)
    weight = torch.zeros_like(total) if updates.covered is not None else torch.zeros((), dtype=torch.float64)
    for row in range(len(updates)):
        total += n[row] * updates.U[row].double()
        weight += n[row] * updates.covered[row] if updates.covered is not None else n[row]
    mean = torch.where(weight > 0, total / weight.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    return torch.where(mean == 0, w, (w.double() + rate * mean).to(w.dtype))  # -0.0 + 0.0 would lose its sign
