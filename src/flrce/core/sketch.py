"""A linear map from d floats to k that keeps inner products: the relationship map of fleets too
large for V (M, d).

A balanced CountSketch: the coordinates are shuffled, given random signs and dealt out to k buckets
in turn; a bucket holds the sum. For every x and y, over the draw of the map S,

    E <Sx, Sy> = <x, y>    and    Var <Sx, Sy> <= (|x|^2 |y|^2 + <x, y>^2) / k <= 2 |x|^2 |y|^2 / k,

because two coordinates share a bucket with probability at most 1/k and signs of different ones
cancel in the mean. Sketched norms and products belong to real vectors of R^k, so cosines stay in
[-1, 1] and distances real. S being linear, H's part from fresh updates is <Su/|Su|, sum_j
Sv_j/|Sv_j|>: its error falls as 1/sqrt(k) too, relative to the length of that sum, which is at most
M. Only products with past updates V are sketched: <u, w> is taken before.

A shuffle of millions of coordinates is a walk through all of the memory. Above LARGE of them,
blocks of k are turned by a random offset each instead: two coordinates of one block never share a
bucket, two of different blocks with probability 1/k, so that the same bounds hold.

The map follows from (d, k, seed) and is never stored. Whoever knows it can craft updates that it
does not see.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flrce.core import linalg, tensor_bytes
from flrce.rng import make_stream

MAX_SHUFFLED_FLOATS = 2**22
BLOCKS_PER_CALL = 16  # turned at a time
# vectors shuffled at a time, so that the copy stays in the cache, or at least small
ROWS, FLOATS = (8, 2**24)
DeviceTensors = dict[torch.device, Any]  # a map's own tensors on devices


@dataclass(frozen=True)
class CountSketch:
    """S: (n, d) -> (n, k)."""

    k: int
    order: Tensor  # (d,) the shuffled coordinates; the i-th goes to bucket i mod k
    signs: Tensor  # (d,) +1 or -1, in that order
    there: DeviceTensors = field(default_factory=dict)

    def __call__(self, X: Tensor) -> Tensor:
        order, signs = (
            (self.order, self.signs)
            if tensor_bytes.is_on_host(X)
            else _copy_to_device_of(self.there, X, self.order, self.signs)
        )
        d, rest = len(order), len(order) % self.k
        sketched, rows_at_once = X.new_zeros(len(X), self.k), max(1, min(ROWS, FLOATS // d))
        for rows, into in zip(X.split(rows_at_once), sketched.split(rows_at_once), strict=True):
            dealt = rows.index_select(1, order).mul_(signs.to(X.dtype))
            into += dealt[:, : d - rest].reshape(len(rows), d // self.k, self.k).sum(1)
            into[:, :rest] += dealt[:, d - rest :]
        return sketched


@dataclass(frozen=True)
class RotatedSketch:
    """S for large d: (n, d) -> (n, k), block by block of k coordinates."""

    k: int
    offsets: Tensor  # (ceil(d / k),) by how much a block is turned
    signs: Tensor  # (d,) int8, +1 or -1
    there: DeviceTensors = field(default_factory=dict)

    def __call__(self, X: Tensor) -> Tensor:
        k = self.k
        if not tensor_bytes.is_on_host(X):
            return sketch_on_device(
                X, k, *_copy_to_device_of(self.there, X, self.offsets, self.signs, torch.arange(k))
            )
        compiled = linalg.sum_rotated_blocks(X, self.signs, self.offsets, k)
        if compiled is not None:
            return compiled[:, :k] + compiled[:, k:]
        x, signs, offsets = X.numpy(), self.signs.numpy(), self.offsets.tolist()
        sketched = np.zeros((len(x), 2 * k), x.dtype)
        for first in range(
            0, len(offsets), BLOCKS_PER_CALL
        ):  # numpy: on so few floats at a time its calls cost less
            columns = slice(first * k, (first + BLOCKS_PER_CALL) * k)
            plus_or_minus = signs[columns].astype(x.dtype)
            for row, into in zip(x[:, columns], sketched, strict=True):
                signed, start = row * plus_or_minus, 0
                for offset in offsets[first : first + BLOCKS_PER_CALL]:
                    block = signed[start : start + k]
                    into[offset : offset + len(block)] += block
                    start += k
        # what was turned past the end goes on at the start
        return torch.from_numpy(sketched[:, :k] + sketched[:, k:])


def sketch_on_device(X: Tensor, k: int, offsets: Tensor, signs: Tensor, bucket: Tensor) -> Tensor:
    """(n, k) as Turned, for a device: each bucket (k,) looks up what falls into it, so that sums
    have a fixed order.

    They are made in float64: other last digits than on the host.
    """
    n, blocks = len(X), max(1, FLOATS // (len(X) * k))
    sketched = X.new_zeros(n, k, dtype=torch.float64)
    for turns, start in zip(offsets.split(blocks), range(0, X.shape[1], blocks * k), strict=True):
        signed = X[:, start : start + blocks * k] * signs[start : start + blocks * k]
        signed = torch.nn.functional.pad(signed, (0, len(turns) * k - signed.shape[1]))
        # (blocks, k): the coordinate of a block that a bucket takes
        source = (bucket - turns[:, None]) % k
        dealt = signed.view(n, len(turns), k).gather(2, source.expand(n, -1, -1))
        sketched += dealt.sum(1, dtype=torch.float64)
    return sketched.to(X.dtype)


def _copy_to_device_of(there: DeviceTensors, X: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
    """A map's own tensors where X is; they are sent once."""
    if X.device not in there:
        there[X.device] = tuple(tensor_bytes.to_device_of(x, X) for x in own)
    copies: tuple[Tensor, ...] = there[X.device]
    return copies


@lru_cache(maxsize=4)
def make_sketch(d: int, k: int, seed: int = 0) -> CountSketch | RotatedSketch:
    """The map for vectors of d floats; the same arguments give the same map on every machine."""
    rng = make_stream(seed, f"sketch {d} {k}")
    if d > MAX_SHUFFLED_FLOATS:
        signs = torch.from_numpy(rng.integers(0, 2, d, dtype=np.int8)).mul_(2).sub_(1)
        return RotatedSketch(k, torch.from_numpy(rng.integers(0, k, -(-d // k))), signs)
    order = torch.from_numpy(rng.permutation(d)).int()  # half the memory
    signs = torch.from_numpy(rng.integers(0, 2, d)).float().mul_(2).sub_(1)
    return CountSketch(k, order, signs)


def sketch_error_bound(k: int) -> float:
    """Bound on the root mean square error of <Sx, Sy> in units of |x| |y|, for any x and y."""
    return math.sqrt(2 / k)
