# mypy: ignore-errors
"""Dropout of many lanes in Triton: each value's draw is made again in the backward pass."""

import triton
import triton.language as tl

# splitmix64's constants
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def drop(x, keys, y, n, threshold, scale, SIZE: tl.constexpr):
    """y = x * scale where a value's draw of 24 bits is at least the threshold, else 0; x and y
    (lanes, n), keys (lanes,) int64. Draws are those of operations.draw_random_integers.
    """
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    h = tl.load(keys + lane).to(tl.uint64)
    h += (at + 1).to(tl.uint64) * tl.full((), GOLDEN, tl.uint64)
    h = (h ^ (h >> 30)) * tl.full((), FIRST, tl.uint64)
    h = (h ^ (h >> 27)) * tl.full((), SECOND, tl.uint64)
    drawn = ((h ^ (h >> 31)) >> 40).to(tl.int32)
    v = tl.load(x + lane * n + at, mask=at < n, other=0.0)
    kept = tl.where(drawn >= threshold, v * scale, 0.0)
    tl.store(y + lane * n + at, kept.to(v.dtype), mask=at < n)
