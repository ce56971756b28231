"""Weighted means of updates. Sums run in float64 over replies in a fixed order, so no arrival order
shows.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flrce.core import linalg, tensor_bytes
from flrce.core.bounds import LearningRate, NonNegativeFloat
from flrce.core.roles import Aggregator
from flrce.core.tensor_bytes import allocate_like
from flrce.core.types import Updates

# FLrce's own: times a round's median samples that one client is believed to have
# (research/docs/robustness.md)
DEFAULT_SAMPLE_CAP_RATIO = 5.0
# coordinates summed at a time: several float64 copies of a large model would be alive at once
CHUNK_COLUMNS = 2**16
# the same on a device, which waits for calls; any number gives the same bits
DEVICE_CHUNK_COLUMNS = 2**22


@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """Eq. 4: w + rate * sum p_k u_k. Coordinates that only some clients hold are averaged over
    those that do.

    `by` weighs a client by its "samples" n_k, or all "equal"ly; n_k is its own claim, so no more
    than `cap` times the median of the round's is believed (0: any). A coordinate nobody holds keeps
    its bits. `fill` lets a client without a coordinate vote for its old value (Wen et al. 2022), so
    that rarely held ones move less.
    """

    rate: LearningRate = 1.0
    by: Literal["samples", "equal"] = "samples"
    fill: bool = False
    cap: NonNegativeFloat = 0.0
    blockwise: ClassVar[bool] = True
    device_agnostic: ClassVar[bool] = True

    def __call__(self, w: Tensor, updates: Updates, state: Any) -> Tensor:
        n = compute_reply_weights(updates.n, self.by, self.cap)
        return add_weighted_mean(
            w, replace(updates, covered=None) if self.fill else updates, n, self.rate
        )


def compute_reply_weights(n: Tensor, by: str, cap: float = 0.0) -> Tensor:
    """(P,) what each reply counts, from the samples that its client claims."""
    if by == "equal":
        return torch.ones_like(n)
    return n.clamp(max=cap * float(n.median())) if cap and len(n) else n


def add_weighted_mean(w: Tensor, updates: Updates, n: Tensor, rate: float = 1.0) -> Tensor:
    """w plus the n-weighted mean of the updates, over whoever covers a coordinate."""
    made = allocate_like(w)
    if rate == 1 and updates.covered is None and linalg.write_weighted_mean(w, updates.U, n, made):
        return made
    columns = CHUNK_COLUMNS if tensor_bytes.is_on_host(w) else DEVICE_CHUNK_COLUMNS
    for start in range(0, len(w), columns):
        part = slice(start, start + columns)
        covered = None if updates.covered is None else updates.covered[:, part]
        made[part] = _add_weighted_mean_chunk(w[part], updates.U[:, part], covered, n, rate)
    return made


def _add_weighted_mean_chunk(
    w: Tensor, U: Tensor, covered: Tensor | None, n: Tensor, rate: float
) -> Tensor:
    total, wide = torch.zeros_like(w, dtype=torch.float64), torch.empty_like(w, dtype=torch.float64)
    weight = (
        torch.zeros_like(total) if covered is not None else torch.zeros((), dtype=torch.float64)
    )
    for row in range(len(U)):
        # products of 24 bits each are exact, fused or not
        total.add_(wide.copy_(U[row]), alpha=float(n[row]))
        weight += n[row] * covered[row] if covered is not None else n[row]
    mean = total.div_(weight.clamp(min=torch.finfo(torch.float64).tiny))
    if covered is not None:
        mean = torch.where(weight > 0, mean, 0.0)
    moved = wide.copy_(w).add_(mean if rate == 1 else rate * mean).to(w.dtype)
    return torch.where(mean == 0, w, moved)  # -0.0 + 0.0 would lose its sign
