"""Golomb's code of gaps: g >> b in unary, the b lowest bits as they are."""

import math

import numpy as np
from numpy.typing import NDArray

from flrce_client.bits import ByteArray, count_packed_bytes
from flrce_client.errors import MalformedPayload

LOG_GOLDEN = math.log((math.sqrt(5) - 1) / 2)  # of the golden ratio less 1


def choose_golomb_bits(n: int, count: int) -> int:
    """b = max(0, 1 + floor(log2(ln(phi - 1) / ln(1 - p)))), p = count / n: the shortest code of
    geometric gaps.
    """
    if not count or count >= n:
        return 0
    return max(0, 1 + math.floor(math.log2(LOG_GOLDEN / math.log1p(-count / n))))


def pack_gaps(gaps: NDArray[np.int64], bits: int) -> tuple[ByteArray, ByteArray]:
    """(quotients: as many ones as each gap >> bits, then a zero; the lowest bits of all gaps)."""
    ends = np.cumsum((gaps >> bits) + 1) - 1
    unary = np.ones(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    unary[ends] = 0
    places = np.arange(bits - 1, -1, -1)
    binary = (gaps[:, None] >> places & 1).astype(np.uint8)
    return np.packbits(unary), np.packbits(binary)


def unpack_positions(
    quotients: ByteArray, remainders: ByteArray, n: int, count: int
) -> NDArray[np.int64]:
    """(count,) the coordinates whose gaps were packed; Malformed where they do not end within n."""
    bits = choose_golomb_bits(n, count)
    unary = np.unpackbits(quotients)
    ends = np.flatnonzero(unary == 0)[:count]
    length = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) < count or len(quotients) != count_packed_bytes(length, 1) or unary[length:].any():
        raise MalformedPayload(f"quotients are not those of {count} gaps")
    binary = np.unpackbits(remainders)
    if binary[count * bits :].any():
        raise MalformedPayload("bits beyond the last remainder are not zero")
    table = binary[: count * bits].reshape(count, bits).astype(np.int64)
    low = (table << np.arange(bits - 1, -1, -1)).sum(1)
    gaps = (np.diff(ends, prepend=-1) - 1 << bits) + low
    where = np.cumsum(gaps + 1) - 1
    if count and where[-1] >= n:
        raise MalformedPayload(f"coordinate {where[-1]} lies beyond {n}")
    return where
