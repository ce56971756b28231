"""A linear map from d floats to k that keeps inner products: the relationship map of fleets too large for V (M, d).

A balanced CountSketch: the coordinates are shuffled, given random signs and dealt out to k buckets in turn; a bucket
holds the sum. For every x and y, over the draw of the map S,

    E <Sx, Sy> = <x, y>    and    Var <Sx, Sy> <= (|x|^2 |y|^2 + <x, y>^2) / k <= 2 |x|^2 |y|^2 / k,

because two coordinates share a bucket with probability at most 1/k and signs of different ones cancel in the mean.
Sketched norms and products belong to real vectors of R^k, so cosines stay in [-1, 1] and distances real. S being
linear, H's part from fresh updates is <Su/|Su|, sum_j Sv_j/|Sv_j|>: its error falls as 1/sqrt(k) too, relative to the
length of that sum, which is at most M. Only products with past updates V are sketched: <u, w> is taken before.

The map follows from (d, k, seed) and is never stored. Whoever knows it can craft updates that it does not see.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flrce.rng import stream

ROWS, FLOATS = 8, 2**24  # vectors shuffled at a time, so that the copy stays in the cache, or at least small


@dataclass(frozen=True)
class Sketch:
    """S: (n, d) -> (n, k)."""

    k: int
    order: Tensor  # (d,) the shuffled coordinates; the i-th goes to bucket i mod k
    signs: Tensor  # (d,) +1 or -1, in that order

    def __call__(self, X: Tensor) -> Tensor:
        d, rest = len(self.order), len(self.order) % self.k
        found, few = X.new_zeros(len(X), self.k), max(1, min(ROWS, FLOATS // d))
        for rows, into in zip(X.split(few), found.split(few), strict=True):
            dealt = rows.index_select(1, self.order).mul_(self.signs.to(X.dtype))
            into += dealt[:, : d - rest].reshape(len(rows), d // self.k, self.k).sum(1)
            into[:, :rest] += dealt[:, d - rest :]
        return found


@lru_cache(maxsize=4)
def sketch(d: int, k: int, seed: int = 0) -> Sketch:
    """The map for vectors of d floats; the same arguments give the same map on every machine."""
    rng = stream(seed, f"sketch {d} {k}")
    order = torch.from_numpy(rng.permutation(d)).int()  # half the memory
    signs = torch.from_numpy(rng.integers(0, 2, d)).float().mul_(2).sub_(1)
    return Sketch(k, order, signs)


def deviation(k: int) -> float:
    """Bound on the root mean square error of <Sx, Sy> in units of |x| |y|, for any x and y."""
    return math.sqrt(2 / k)
