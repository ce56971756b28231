"""Random rotations: a Hadamard transform with random signs, over chunks of powers of two.

A vector of n floats is cut into chunks of `block` floats. The remainder is cut into the powers of
two that it is the sum of, and the last of them is padded with zeros where that costs little more
than the scales of further chunks. So 134,902 floats need 135,168 coordinates of one bit, where one
transform of the whole vector would need 262,144.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from flrce_client.layout import FloatArray

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


def split_chunks(x: FloatArray, groups: Sequence[ChunkGroup]) -> list[FloatArray]:
    """x (n,) as one (rows, size) array for each group, padded with zeros."""
    padded = np.zeros(sum(group.floats for group in groups), np.float32)
    padded[: len(x)] = x
    ends = np.cumsum([group.floats for group in groups])[:-1]
    parts = np.split(padded, ends) if groups else []
    return [part.reshape(group.rows, -1) for part, group in zip(parts, groups, strict=True)]


def draw_signs(rng: Generator, n: int) -> FloatArray:
    """(n,) random signs, +1 or -1."""
    packed = np.frombuffer(rng.bytes(-(-n // 8)) or b"\0", np.uint8)
    return 1 - 2 * np.unpackbits(packed)[:n].astype(np.float32)


def transform_hadamard(x: FloatArray) -> FloatArray:
    """H x of each row of x (rows, size): Sylvester's H of +1 and -1, not normalised, so H H x =
    size * x. Every step is one float32 addition or subtraction in a fixed order, first over the
    columns of each row as a matrix, then over its rows, so every backend computes the same values.
    """
    rows, size = x.shape
    columns = 1 << (size.bit_length() - 1) // 2
    y = x.reshape(rows, size // columns, columns).copy()
    _apply_butterflies(y)
    y = np.ascontiguousarray(y.transpose(0, 2, 1))
    _apply_butterflies(y)
    return y.transpose(0, 2, 1).reshape(rows, size)


def _apply_butterflies(x: FloatArray) -> None:
    """In place, H over the middle dimension of x (rows, size, columns): (a, b) -> (a + b, a - b)
    over distances size / 2, size / 4, ..., 1.
    """
    rows, size, columns = x.shape
    distance = size // 2
    while distance:
        pairs = x.reshape(rows, -1, 2, distance * columns)
        difference = pairs[:, :, 0] - pairs[:, :, 1]
        pairs[:, :, 0] += pairs[:, :, 1]
        pairs[:, :, 1] = difference
        distance //= 2
