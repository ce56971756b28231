"""Levels of a few bits, one after another without gaps."""

import math

import numpy as np
from numpy.typing import NDArray

from flrce_client.errors import MalformedPayload

ByteArray = NDArray[np.uint8]


def floor_share(rate: float, size: int) -> int:
    """max(1, floor(rate * size)); rounding first, since .29 * 100 is 28.999..."""
    return max(1, math.floor(round(rate * size, 6)))


def count_packed_bytes(count: int, bits: int) -> int:
    """Bytes of so many levels without gaps."""
    return -(-count * bits // 8)


def pack_bits(levels: ByteArray, bits: int) -> ByteArray:
    """Levels (n,) below 2^bits, one after another without gaps."""
    if bits == 8:
        return levels
    if bits == 1:
        return np.packbits(levels)
    if 8 % bits == 0:  # whole levels to a byte, the first in its highest bits: shifts are faster
        packed = np.zeros(count_packed_bytes(len(levels), bits), np.uint8)
        for i, place in enumerate(range(8 - bits, -1, -bits)):
            mine = levels[i :: 8 // bits]
            packed[: len(mine)] |= mine << place
        return packed
    return np.packbits(np.unpackbits(levels[:, None], axis=1)[:, 8 - bits :])


def unpack_bits(packed: ByteArray, bits: int, n: int) -> ByteArray:
    """The n levels that `pack_bits` packed; Malformed where the padding is not zero."""
    if bits == 8:
        return packed
    if 8 % bits == 0:
        if bits == 1:
            unpacked = np.unpackbits(packed)
        else:
            unpacked = np.empty(len(packed) * 8 // bits, np.uint8)
            for i, place in enumerate(range(8 - bits, -1, -bits)):
                unpacked[i :: 8 // bits] = packed >> place & (2**bits - 1)
        if unpacked[n:].any():
            raise MalformedPayload("bits beyond the last level are not zero")
        return unpacked[:n]
    flat = np.unpackbits(packed)
    if flat[n * bits :].any():
        raise MalformedPayload("bits beyond the last level are not zero")
    planes = np.zeros((n, 8), np.uint8)
    planes[:, 8 - bits :] = flat[: n * bits].reshape(n, bits)
    return np.packbits(planes, axis=1)[:, 0]
