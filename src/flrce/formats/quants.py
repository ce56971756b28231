"""Blocks of quantised weights -> float32, as llama.cpp lays them out.

A block holds 32 weights along a row: a scale d (float16), for the kinds `_1` a least value m, and the weights' levels.
In a byte of 4-bit levels the low half is weight i, the high half weight i + 16.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
BLOCK = 32  # weights of a quantised block


def _half(raw: Bytes) -> Floats:
    """(n, 2) bytes -> (n, 1)."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """(n, 16) -> (n, 32) levels of 4 bits."""
    return np.concatenate([raw & 15, raw >> 4], 1)


def _fifth(raw: Bytes) -> Bytes:
    """(n, 4) bytes -> (n, 32) the fifth bit of each level, in its place."""
    return (np.unpackbits(raw, axis=1, bitorder="little") << 4).astype(np.uint8)


def _q4_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]) + _half(b[:, 2:4])


def _q5_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * ((_nibbles(b[:, 6:]) | _fifth(b[:, 2:6])).astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_nibbles(b[:, 8:]) | _fifth(b[:, 4:8])) + _half(b[:, 2:4])


def _q8_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * np.ascontiguousarray(b[:, 2:]).view(np.int8)


def _bf16(b: Bytes) -> Floats:
    """The upper half of a float32."""
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Quant:
    """`size` bytes stand for `weights` weights; `read` takes (n, size) bytes to (n, weights) floats."""

    name: str
    weights: int
    size: int
    read: Callable[[Bytes], Floats]


#: by the number that GGUF gives each kind
QUANTS: dict[int, Quant] = {
    0: Quant("F32", 1, 4, lambda b: b.view(np.float32)),
    1: Quant("F16", 1, 2, lambda b: b.view(np.float16).astype(np.float32)),
    2: Quant("Q4_0", BLOCK, 18, _q4_0),
    3: Quant("Q4_1", BLOCK, 20, _q4_1),
    6: Quant("Q5_0", BLOCK, 22, _q5_0),
    7: Quant("Q5_1", BLOCK, 24, _q5_1),
    8: Quant("Q8_0", BLOCK, 34, _q8_0),
    30: Quant("BF16", 1, 2, _bf16),
}


def dequantised(kind: Quant, raw: Bytes) -> Floats:
    """All weights of a tensor, in order."""
    blocks = np.ascontiguousarray(raw).reshape(-1, kind.size)
    return kind.read(blocks).astype(np.float32, copy=False).reshape(-1)
