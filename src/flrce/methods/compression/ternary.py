"""Sparse ternary compression (STC, Sattler et al. 2019): the largest coordinates, one magnitude,
their signs, and Golomb-coded gaps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.bounds import PositiveProportion
from flrce.core.payload_bytes import count_value_bytes
from flrce.core.pieces import MalformedPayload, get_buffer
from flrce.core.roles import Compressor
from flrce.core.types import Payload
from flrce.methods.compression.buffers import (
    TensorSizes,
    count_floats,
    count_packed_bytes,
    count_span_floats,
    join_spans,
    mask_largest,
    pack_bits,
    require_buffers,
    split_statistics,
    take_spans,
    unpack_bits,
    validate_share,
)
from flrce.models.part import floor_share

LOG_GOLDEN = math.log((math.sqrt(5) - 1) / 2)  # of the golden ratio less 1


@dataclass(frozen=True)
class SparseTernary(Compressor):
    """The K = max(1, floor(share * n)) coordinates largest in magnitude become mu times their sign,
    mu the mean of their magnitudes; the rest are zero.

    A gap g >= 0 between kept coordinates is coded by Golomb: g >> b in unary, the b lowest bits as
    they are. BatchNorm's statistics travel as float32. STC keeps what is left out: put
    `error-feedback` around it.
    """

    share: PositiveProportion = 0.01

    def __post_init__(self) -> None:
        validate_share("share", self.share)

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        coded, exact = split_statistics(layout)
        x = take_spans(u, coded).cpu()
        count = self._count_kept(len(x))
        where = mask_largest(x, count).nonzero()[:, 0]
        kept = x[where]
        magnitude = kept.abs().mean(dtype=torch.float64).float().reshape(1)
        gaps = np.diff(where.numpy(), prepend=-1) - 1
        quotients, remainders = encode_golomb(gaps, choose_golomb_bits(len(x), count))
        buffers = {
            "quotients": quotients,
            "remainders": remainders,
            "signs": pack_bits((kept >= 0).byte(), 1),
            "magnitude": magnitude if count else magnitude.new_zeros(1),
        }
        if exact:
            buffers["statistics"] = take_spans(u, exact)
        return Payload(buffers), carry

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator | None = None) -> Tensor:
        coded, exact = split_statistics(layout)
        names = {"quotients", "remainders", "signs", "magnitude"}
        require_buffers(payload, names | ({"statistics"} if exact else set()))
        n = count_span_floats(coded)
        count = self._count_kept(n)
        signs = unpack_bits(
            get_buffer(payload, "signs", torch.uint8, count_packed_bytes(count, 1)), 1, count
        )
        where = decode_golomb(payload, n, count)
        x = torch.zeros(n)
        magnitude = get_buffer(payload, "magnitude", torch.float32, 1)
        x[where] = (2 * signs.cpu().float() - 1) * magnitude.cpu()
        parts = [(coded, x)]
        if exact:
            rest = count_span_floats(exact)
            parts.append((exact, get_buffer(payload, "statistics", torch.float32, rest).cpu()))
        return join_spans(parts, count_floats(layout))

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """The most that a payload can weigh: all gaps but the quotients' sum are known."""
        coded, exact = split_statistics(layout)
        n = count_span_floats(coded)
        count = self._count_kept(n)
        bits = choose_golomb_bits(n, count)
        quotients = count_packed_bytes(count + (n - count >> bits), 1)
        packed = quotients + count_packed_bytes(count, bits) + count_packed_bytes(count, 1)
        return packed + count_value_bytes(1 + count_span_floats(exact))

    def _count_kept(self, n: int) -> int:
        return floor_share(self.share, n) if n else 0


def choose_golomb_bits(n: int, count: int) -> int:
    """b = max(0, 1 + floor(log2(ln(phi - 1) / ln(1 - p)))), p = count / n: the shortest code of
    geometric gaps.
    """
    if not count or count >= n:
        return 0
    return max(0, 1 + math.floor(math.log2(LOG_GOLDEN / math.log1p(-count / n))))


def encode_golomb(gaps: NDArray[np.int64], bits: int) -> tuple[Tensor, Tensor]:
    """(quotients: as many ones as each gap >> bits, then a zero; the lowest bits of all gaps)."""
    ends = np.cumsum((gaps >> bits) + 1) - 1
    unary = np.ones(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    unary[ends] = 0
    places = np.arange(bits - 1, -1, -1)
    binary = (gaps[:, None] >> places & 1).astype(np.uint8)
    return torch.from_numpy(np.packbits(unary)), torch.from_numpy(np.packbits(binary))


def decode_golomb(payload: Payload, n: int, count: int) -> Tensor:
    """(count,) the coordinates whose gaps were coded; Malformed where they do not end within n."""
    bits = choose_golomb_bits(n, count)
    packed = payload.buffers["quotients"]
    quotients = get_buffer(payload, "quotients", torch.uint8, packed.numel()).numpy(force=True)
    unary = np.unpackbits(quotients)
    ends = np.flatnonzero(unary == 0)[:count]
    length = int(ends[-1]) + 1 if len(ends) else 0
    if len(ends) < count or len(packed) != count_packed_bytes(length, 1) or unary[length:].any():
        raise MalformedPayload(f"quotients are not those of {count} gaps")
    size = count_packed_bytes(count, bits)
    binary = np.unpackbits(get_buffer(payload, "remainders", torch.uint8, size).numpy(force=True))
    if binary[count * bits :].any():
        raise MalformedPayload("bits beyond the last remainder are not zero")
    table = binary[: count * bits].reshape(count, bits).astype(np.int64)
    low = (table << np.arange(bits - 1, -1, -1)).sum(1)
    gaps = (np.diff(ends, prepend=-1) - 1 << bits) + low
    where = np.cumsum(gaps + 1) - 1
    if count and where[-1] >= n:
        raise MalformedPayload(f"coordinate {where[-1]} lies beyond {n}")
    return torch.from_numpy(where)
