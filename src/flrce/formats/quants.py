"""Blocks of quantised weights -> float32, as llama.cpp lays them out.

A block holds 32 weights along a row: a scale d (float16), for the kinds `_1` a least value m, and
the weights' levels. In a byte of 4-bit levels the low half is weight i, the high half weight i +
16. The kinds `_K` have super-blocks of 256 with scales of scales.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
FloatArray = NDArray[np.float32]
BLOCK, SUPER = 32, 256  # weights of a quantised block, and of a super-block of the kinds `_K`


def _read_float16(raw: ByteArray) -> FloatArray:
    """(n, 2) bytes -> (n, 1)."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _unpack_nibbles(raw: ByteArray) -> ByteArray:
    """(n, 16) -> (n, 32) levels of 4 bits."""
    return np.concatenate([raw & 15, raw >> 4], 1)


def _unpack_fifth_bits(raw: ByteArray) -> ByteArray:
    """(n, 4) bytes -> (n, 32) the fifth bit of each level, in its place."""
    return (np.unpackbits(raw, axis=1, bitorder="little") << 4).astype(np.uint8)


def _decode_q4_0(b: ByteArray) -> FloatArray:
    return _read_float16(b[:, :2]) * (_unpack_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _decode_q4_1(b: ByteArray) -> FloatArray:
    return _read_float16(b[:, :2]) * _unpack_nibbles(b[:, 4:]) + _read_float16(b[:, 2:4])


def _decode_q5_0(b: ByteArray) -> FloatArray:
    return _read_float16(b[:, :2]) * (
        (_unpack_nibbles(b[:, 6:]) | _unpack_fifth_bits(b[:, 2:6])).astype(np.float32) - 16
    )


def _decode_q5_1(b: ByteArray) -> FloatArray:
    return _read_float16(b[:, :2]) * (
        _unpack_nibbles(b[:, 8:]) | _unpack_fifth_bits(b[:, 4:8])
    ) + _read_float16(b[:, 2:4])


def _decode_q8_0(b: ByteArray) -> FloatArray:
    return _read_float16(b[:, :2]) * np.ascontiguousarray(b[:, 2:]).view(np.int8)


def _unpack_scales(b: ByteArray) -> tuple[FloatArray, FloatArray]:
    """(n, 12) bytes -> (n, 8) scales and (n, 8) least values of 6 bits each, the upper four pieced
    together.
    """
    low, high, rest = b[:, :4], b[:, 4:8], b[:, 8:]
    d = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], 1)
    m = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], 1)
    return d.astype(np.float32), m.astype(np.float32)


def _unpack_k_levels(b: ByteArray) -> ByteArray:
    """(n, 128) bytes -> (n, 8, 32): of each 32 bytes, first the low halves and then the high
    ones.
    """
    four = b.reshape(-1, 4, 1, 32)
    return np.concatenate([four & 15, four >> 4], 2).reshape(-1, 8, 32)


def _decode_k_block(b: ByteArray, levels: ByteArray) -> FloatArray:
    """(n, 8, 32) levels with the super-block's two scales before its 8 scales and least values."""
    d, m = _unpack_scales(b[:, 4:16])
    found = (_read_float16(b[:, :2]) * d)[..., None] * levels - (_read_float16(b[:, 2:4]) * m)[
        ..., None
    ]
    return found.reshape(len(b), SUPER)


def _decode_q4_k(b: ByteArray) -> FloatArray:
    return _decode_k_block(b, _unpack_k_levels(b[:, 16:]))


def _decode_q5_k(b: ByteArray) -> FloatArray:
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # (n, 8, 32)
    return _decode_k_block(b, _unpack_k_levels(b[:, 48:]) | (fifth << 4).astype(np.uint8))


def _decode_q6_k(b: ByteArray) -> FloatArray:
    """Low halves (2 x 64 bytes), upper two bits (2 x 32 bytes), 16 scales of 8 bits, d."""
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], 2).reshape(-1, 2, 4, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    levels = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return ((_read_float16(b[:, 208:]) * scales)[..., None] * levels).reshape(len(b), SUPER)


def _decode_bf16(b: ByteArray) -> FloatArray:
    """The upper half of a float32."""
    return (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class QuantFormat:
    """`size` bytes stand for `weights` weights; `read` takes (n, size) bytes to (n, weights)
    floats.
    """

    name: str
    weights: int
    size: int
    read: Callable[[ByteArray], FloatArray]


#: by the number that GGUF gives each kind
QUANT_FORMATS: dict[int, QuantFormat] = {
    0: QuantFormat("F32", 1, 4, lambda b: b.view(np.float32)),
    1: QuantFormat("F16", 1, 2, lambda b: b.view(np.float16).astype(np.float32)),
    2: QuantFormat("Q4_0", BLOCK, 18, _decode_q4_0),
    3: QuantFormat("Q4_1", BLOCK, 20, _decode_q4_1),
    6: QuantFormat("Q5_0", BLOCK, 22, _decode_q5_0),
    7: QuantFormat("Q5_1", BLOCK, 24, _decode_q5_1),
    8: QuantFormat("Q8_0", BLOCK, 34, _decode_q8_0),
    12: QuantFormat("Q4_K", SUPER, 144, _decode_q4_k),
    13: QuantFormat("Q5_K", SUPER, 176, _decode_q5_k),
    14: QuantFormat("Q6_K", SUPER, 210, _decode_q6_k),
    30: QuantFormat("BF16", 1, 2, _decode_bf16),
}


def dequantise_weights(kind: QuantFormat, raw: ByteArray) -> FloatArray:
    """All weights of a tensor, in order."""
    blocks = np.ascontiguousarray(raw).reshape(-1, kind.size)
    return kind.read(blocks).astype(np.float32, copy=False).reshape(-1)
