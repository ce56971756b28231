"""Sparse ternary compression (STC, Sattler et al. 2019): the largest coordinates, one magnitude,
their signs, and Golomb-coded gaps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.bounds import PositiveProportion
from flrce.core.pieces import get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.methods.compression.buffers import (
    join_spans,
    mask_largest,
    pack_bits,
    require_buffers,
    take_spans,
    unpack_bits,
)
from flrce.models.part import floor_share
from flrce_client.bits import count_packed_bytes
from flrce_client.golomb import choose_golomb_bits, pack_gaps, unpack_positions
from flrce_client.layout import TensorSizes, count_floats, count_span_floats, split_statistics


@dataclass(frozen=True)
class SparseTernary(Compressor):
    """The K = max(1, floor(share * n)) coordinates largest in magnitude become mu times their sign,
    mu the mean of their magnitudes; the rest are zero.

    A gap g >= 0 between kept coordinates is coded by Golomb: g >> b in unary, the b lowest bits as
    they are. BatchNorm's statistics travel as float32. STC keeps what is left out: put
    `error-feedback` around it.
    """

    share: PositiveProportion = 0.01

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
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
        return Payload(buffers), client_state

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


def encode_golomb(gaps: NDArray[np.int64], bits: int) -> tuple[Tensor, Tensor]:
    """(quotients: as many ones as each gap >> bits, then a zero; the lowest bits of all gaps)."""
    quotients, remainders = pack_gaps(gaps, bits)
    return torch.from_numpy(quotients), torch.from_numpy(remainders)


def decode_golomb(payload: Payload, n: int, count: int) -> Tensor:
    """(count,) the coordinates whose gaps were coded; Malformed where they do not end within n."""
    packed = payload.buffers["quotients"]
    quotients = get_buffer(payload, "quotients", torch.uint8, packed.numel()).numpy(force=True)
    size = count_packed_bytes(count, choose_golomb_bits(n, count))
    remainders = get_buffer(payload, "remainders", torch.uint8, size).numpy(force=True)
    return torch.from_numpy(unpack_positions(quotients, remainders, n, count))
