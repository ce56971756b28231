"""Send only some coordinates: the largest, or random ones that both sides draw alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import PositiveProportion
from flrce.core.pieces import MalformedPayload, get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.methods.compression.buffers import mask_largest, pack_bits, require_buffers, unpack_bits
from flrce.models.part import floor_share
from flrce_client.bits import count_packed_bytes
from flrce_client.layout import STATISTICS_SUFFIXES, TensorSizes, count_floats


@dataclass(frozen=True)
class TopK(Compressor):
    """The K = max(1, floor(keep * d)) coordinates largest in magnitude; ties go to the lowest
    index, the rest are zero.

    `coding` says where they lie: a "bitmap" of d bits, int32 "indices", zeros between them
    ("dense"), or the shortest of these ("auto"), which follows from d and K alone. Buffers are
    named after the coding, and decoding accepts no other. `dense_bn` sends BatchNorm's running
    statistics whole and picks K among the rest. `bits` quantises the values: a sign, and the
    magnitude to the nearest of 2^(bits - 1) levels between the least and the greatest one; None:
    float32.
    """

    keep: PositiveProportion = 0.6
    coding: Literal["auto", "bitmap", "indices", "dense"] = "auto"
    dense_bn: bool = False
    bits: Annotated[int, Ge(1), Le(8)] | None = None

    def __post_init__(self) -> None:
        if self.bits is not None and self.coding == "dense":
            raise BadInput("coding = 'dense' sends float32; use 'auto', 'bitmap' or 'indices'")

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"bitmap": 1, "levels": self.bits or 8}

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        d = self._count_candidates(layout)
        rest = {"statistics": u[d:].float()} if self.dense_bn else {}
        u = u[:d].float()
        K = floor_share(self.keep, d) if d else 0
        kept = mask_largest(u, K)
        coding = self._choose_coding(d, K)
        if coding == "dense":
            return Payload({"dense": u.where(kept, 0.0), **rest}), client_state
        where = (
            torch.from_numpy(np.packbits(kept.numpy()))
            if coding == "bitmap"
            else kept.nonzero()[:, 0].int()
        )
        if self.bits is None:
            return Payload({coding: where, "values": u[kept], **rest}), client_state
        levels, ranges = quantise_magnitudes(u[kept], self.bits)
        levels = pack_bits(levels, self.bits)
        return Payload({coding: where, "levels": levels, "ranges": ranges, **rest}), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator | None = None) -> Tensor:
        d, D = self._count_candidates(layout), count_floats(layout)
        K = floor_share(self.keep, d) if d else 0
        coding = self._choose_coding(d, K)
        values_in = {"values"} if self.bits is None else {"levels", "ranges"}
        promised = {coding} if coding == "dense" else {coding} | values_in
        require_buffers(payload, promised | ({"statistics"} if self.dense_bn else set()))
        u = torch.zeros(D)
        if coding == "dense":
            u[:d] = get_buffer(payload, "dense", torch.float32, d)
            if int(u[:d].count_nonzero()) > K:
                raise MalformedPayload(f"more than the {K} values that were asked for are not zero")
        else:
            where = (_decode_bitmap if coding == "bitmap" else _decode_indices)(payload, d, K)
            u[:d][where] = self._decode_values(payload, K)
        if self.dense_bn:
            u[d:] = get_buffer(payload, "statistics", torch.float32, D - d)
        return u

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update."""
        d = self._count_candidates(layout)
        K = floor_share(self.keep, d) if d else 0
        rest = count_floats(layout) - d if self.dense_bn else 0
        coding = self._choose_coding(d, K)
        return _coded_bytes(coding, d, K, self.bits) + count_value_bytes(rest)

    def _decode_values(self, payload: Payload, K: int) -> Tensor:
        if self.bits is None:
            return get_buffer(payload, "values", torch.float32, K)
        size = count_packed_bytes(K, self.bits)
        levels = unpack_bits(get_buffer(payload, "levels", torch.uint8, size), self.bits, K)
        return restore_magnitudes(
            levels, get_buffer(payload, "ranges", torch.float32, 2), self.bits
        )

    def _choose_coding(self, d: int, K: int) -> str:
        if self.coding != "auto":
            return self.coding
        codings = ("dense", "bitmap", "indices") if self.bits is None else ("bitmap", "indices")
        return min(codings, key=lambda coding: _coded_bytes(coding, d, K, self.bits))

    def _count_candidates(self, layout: TensorSizes) -> int:
        """How many coordinates K is picked from; running statistics come last in a layout."""
        return sum(
            size
            for name, size in layout
            if not (self.dense_bn and name.endswith(STATISTICS_SUFFIXES))
        )


@dataclass(frozen=True)
class RandomK(Compressor):
    """max(1, floor(keep * d)) random coordinates; both sides draw which, so only values travel.

    `scaled` multiplies them by d / K, so that the mean over draws is the whole update.
    """

    keep: PositiveProportion = 0.1
    scaled: bool = False

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        return Payload({"values": u.float()[self._draw_positions(layout, rng)]}), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        require_buffers(payload, {"values"})
        where, d = self._draw_positions(layout, rng), count_floats(layout)
        u = torch.zeros(d)
        u[where] = get_buffer(payload, "values", torch.float32, len(where)) * (
            d / len(where) if self.scaled else 1.0
        )
        return u

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update."""
        return count_value_bytes(floor_share(self.keep, count_floats(layout)))

    def _draw_positions(self, layout: TensorSizes, rng: Generator) -> Tensor:
        d = count_floats(layout)
        return torch.from_numpy(np.sort(rng.permutation(d)[: floor_share(self.keep, d)]))


def quantise_magnitudes(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(levels uint8: the sign's bit, 1 for a plus, then those of the magnitude's level; (least
    magnitude, step) float32). One bit has no levels: the mean magnitude, and a step of 0.
    """
    size, top = values.double().abs(), 2 ** (bits - 1) - 1
    if not len(values):
        return values.byte(), torch.zeros(2)
    if not top:
        return (values >= 0).byte(), torch.stack([size.mean(), size.new_tensor(0.0)]).float()
    low = size.min().float().double()
    step = ((size.max() - low) / top).float().double()
    levels = ((size - low) / step).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, top)
    signs = (values >= 0).byte() << bits - 1
    return signs | levels.byte(), torch.stack([low, step]).float()


def restore_magnitudes(levels: Tensor, ranges: Tensor, bits: int) -> Tensor:
    """What `quantise_magnitudes` quantised, to half a step."""
    low, step = ranges.double()
    size = low + step * (levels & 2 ** (bits - 1) - 1).double()
    return torch.where(levels >> bits - 1 == 1, size, -size).float()


def _coded_bytes(coding: str, d: int, K: int, bits: int | None = None) -> int:
    """Bytes of K of d values and of where they lie; values of `bits` have a range of two floats."""
    if coding == "dense":
        return count_value_bytes(d)
    places = -(-d // 8) if coding == "bitmap" else count_value_bytes(K, torch.int32)
    if bits is not None:
        return count_packed_bytes(K, bits) + count_value_bytes(2) + places
    return count_value_bytes(K) + places


def _decode_bitmap(payload: Payload, d: int, K: int) -> Tensor:
    packed = get_buffer(payload, "bitmap", torch.uint8, -(-d // 8))
    bits = np.unpackbits(packed.numpy(force=True))
    if bits[d:].any() or int(bits.sum()) != K:
        raise MalformedPayload(f"bitmap marks {int(bits.sum())} of {d} coordinates, not {K}")
    return torch.from_numpy(bits[:d].astype(bool))


def _decode_indices(payload: Payload, d: int, K: int) -> Tensor:
    where = get_buffer(payload, "indices", torch.int32, K).long()
    if K and (int(where[0]) < 0 or int(where[-1]) >= d or bool((where.diff() <= 0).any())):
        raise MalformedPayload(f"indices do not ascend within 0..{d - 1}")
    return where
