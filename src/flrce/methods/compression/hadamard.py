"""Random rotations: a Hadamard transform with random signs, over chunks of powers of two.

A vector of n floats is cut into chunks of `block` floats. The remainder is cut into the powers of
two that it is the sum of, and the last of them is padded with zeros where that costs little more
than the scales of further chunks. So 134,902 floats need 135,168 coordinates of one bit, where one
transform of the whole vector would need 262,144.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn.functional import pad

MIN_CHUNK = 64  # of a longer vector: rotated coordinates of shorter chunks are far from normal
CHUNK_BITS = 128  # that a chunk more counts for: its scale has 32, the rest is for its time


@dataclass(frozen=True)
class ChunkGroup:
    """`rows` chunks of one size, one after another; the last may be padded."""

    rows: int
    size: int  # a power of two

    @property
    def floats(self) -> int:
        return self.rows * self.size


def plan_chunks(n: int, block: int, bits: float) -> list[ChunkGroup]:
    """How n floats are cut, if a coordinate costs `bits`: as many chunks of `block` as there are,
    then ever smaller ones.
    """
    groups = [ChunkGroup(n // block, block)] if n >= block else []
    return groups + [ChunkGroup(1, size) for size in _cut_remainder(n % block, n, bits)]


def _cut_remainder(rest: int, n: int, bits: float) -> list[int]:
    """Sizes of the chunks of a remainder with the fewest bits: one padded chunk, or one of half its
    size and what the floats behind it need.
    """
    if not rest:
        return []
    whole = 1 << (rest - 1).bit_length()
    if whole == rest or whole <= MIN_CHUNK:
        return [whole if n <= MIN_CHUNK else max(whole, MIN_CHUNK)]
    halves = [whole // 2, *_cut_remainder(rest - whole // 2, n, bits)]
    return min(([whole], halves), key=lambda sizes: sum(sizes) * bits + len(sizes) * CHUNK_BITS)


def split_chunks(x: Tensor, groups: Sequence[ChunkGroup]) -> list[Tensor]:
    """x (n,) as one (rows, size) tensor for each group, padded with zeros."""
    x = pad(x, (0, sum(group.floats for group in groups) - len(x)))
    parts = torch.split(x, [group.floats for group in groups])
    return [part.view(group.rows, -1) for part, group in zip(parts, groups, strict=True)]


def draw_signs(rng: Generator, n: int, device: torch.device) -> Tensor:
    """(n,) random signs, +1 or -1; n / 8 bytes go to the device."""
    packed = torch.frombuffer(bytearray(rng.bytes(-(-n // 8)) or b"\0"), dtype=torch.uint8)
    if device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy()))[:n]
    else:
        places = torch.arange(7, -1, -1, dtype=torch.uint8, device=device)
        bits = (packed.to(device)[:, None] >> places & 1).flatten()[:n]
    return bits.float().mul_(-2).add_(1)


def transform_hadamard(x: Tensor) -> Tensor:
    """H x of each row of x (rows, size): Sylvester's H of +1 and -1, not normalised, so H H x =
    size * x.

    A row is a matrix of about sqrt(size) columns: the butterflies go over its columns, then over
    its rows, so that each one works on long runs of memory. Every step is one float32 addition or
    subtraction in a fixed order, so every backend computes the same values.
    """
    rows, size = x.shape
    columns = 1 << (size.bit_length() - 1) // 2
    y = x.reshape(rows, size // columns, columns).clone()
    _apply_butterflies(y)
    y = y.transpose(1, 2).contiguous()
    _apply_butterflies(y)
    return y.transpose(1, 2).reshape(rows, size)


def _apply_butterflies(x: Tensor) -> None:
    """In place, H over the middle dimension of x (rows, size, columns): (a, b) -> (a + b, a - b)
    over distances size / 2, size / 4, ..., 1.
    """
    rows, size, columns = x.shape
    distance = size // 2
    while distance:
        first, second = x.view(rows, -1, 2, distance * columns).unbind(2)
        difference = first - second
        first += second
        second.copy_(difference)
        distance //= 2
