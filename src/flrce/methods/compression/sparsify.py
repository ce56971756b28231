"""Send only some coordinates: the largest, or random ones that both sides draw alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import PositiveProportion
from flrce.core.payload_bytes import count_value_bytes
from flrce.core.pieces import MalformedPayload, get_buffer
from flrce.core.types import Payload
from flrce.errors import BadInput, suggest_name
from flrce.methods.compression.buffers import (
    TensorSizes,
    count_floats,
    require_buffers,
    validate_share,
)
from flrce.models.part import floor_share

POSITION_CODINGS = ("auto", "bitmap", "indices", "dense")
STATISTICS_SUFFIXES = (".running_mean", ".running_var")


@dataclass(frozen=True)
class TopK:
    """The K = max(1, floor(keep * d)) coordinates largest in magnitude; ties go to the lowest
    index, the rest are zero.

    `coding` says where they lie: a "bitmap" of d bits, int32 "indices", zeros between them
    ("dense"), or the shortest of these ("auto"), which follows from d and K alone. Buffers are
    named after the coding, and decoding accepts no other. `dense_bn` sends BatchNorm's running
    statistics whole and picks K among the rest.
    """

    keep: PositiveProportion = 0.6
    coding: Literal["auto", "bitmap", "indices", "dense"] = "auto"
    dense_bn: bool = False

    def __post_init__(self) -> None:
        validate_share("keep", self.keep)
        if self.coding not in POSITION_CODINGS:
            raise BadInput(
                f"coding = {self.coding!r}: {suggest_name(str(self.coding), POSITION_CODINGS)}"
            )

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        """Bits of a packed symbol, by buffer."""
        return {"bitmap": 1}

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        d = self._count_candidates(layout)
        rest = {"statistics": u[d:].float()} if self.dense_bn else {}
        u = u[:d].float()
        K = floor_share(self.keep, d) if d else 0
        kept = mask_largest(u, K)
        coding = self._choose_coding(d, K)
        if coding == "dense":
            return Payload({"dense": u.where(kept, 0.0), **rest}), carry
        where = (
            torch.from_numpy(np.packbits(kept.numpy()))
            if coding == "bitmap"
            else kept.nonzero()[:, 0].int()
        )
        return Payload({coding: where, "values": u[kept], **rest}), carry

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator | None = None) -> Tensor:
        d, D = self._count_candidates(layout), count_floats(layout)
        K = floor_share(self.keep, d) if d else 0
        coding = self._choose_coding(d, K)
        promised = {coding, "statistics"} if coding == "dense" else {coding, "values", "statistics"}
        require_buffers(payload, promised if self.dense_bn else promised - {"statistics"})
        u = torch.zeros(D)
        if coding == "dense":
            u[:d] = get_buffer(payload, "dense", torch.float32, d)
            if int(u[:d].count_nonzero()) > K:
                raise MalformedPayload(f"more than the {K} values that were asked for are not zero")
        else:
            values = get_buffer(payload, "values", torch.float32, K)
            u[:d][(_decode_bitmap if coding == "bitmap" else _decode_indices)(payload, d, K)] = (
                values
            )
        if self.dense_bn:
            u[d:] = get_buffer(payload, "statistics", torch.float32, D - d)
        return u

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update."""
        d = self._count_candidates(layout)
        K = floor_share(self.keep, d) if d else 0
        rest = count_floats(layout) - d if self.dense_bn else 0
        return _coded_bytes(self._choose_coding(d, K), d, K) + count_value_bytes(rest)

    def _choose_coding(self, d: int, K: int) -> str:
        if self.coding != "auto":
            return self.coding
        return min(("dense", "bitmap", "indices"), key=lambda coding: _coded_bytes(coding, d, K))

    def _count_candidates(self, layout: TensorSizes) -> int:
        """How many coordinates K is picked from; running statistics come last in a layout."""
        return sum(
            size
            for name, size in layout
            if not (self.dense_bn and name.endswith(STATISTICS_SUFFIXES))
        )


@dataclass(frozen=True)
class RandomK:
    """max(1, floor(keep * d)) random coordinates; both sides draw which, so only values travel.

    `scaled` multiplies them by d / K, so that the mean over draws is the whole update.
    """

    keep: PositiveProportion = 0.1
    scaled: bool = False

    def __post_init__(self) -> None:
        validate_share("keep", self.keep)

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        return Payload({"values": u.float()[self._draw_positions(layout, rng)]}), carry

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


def _coded_bytes(coding: str, d: int, K: int) -> int:
    """Bytes of K of d values and of where they lie."""
    if coding == "dense":
        return count_value_bytes(d)
    places = -(-d // 8) if coding == "bitmap" else count_value_bytes(K, torch.int32)
    return count_value_bytes(K) + places


def mask_largest(u: Tensor, K: int) -> Tensor:
    """(d,) bool: the K largest magnitudes, NaN above all; among equals the lowest index."""
    if len(u) <= K:
        return torch.ones(len(u), dtype=torch.bool)
    size = u.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    edge = float(np.partition(size.numpy(), len(u) - K)[len(u) - K])
    above, equal = size > edge, size == edge
    return above | (equal & (equal.cumsum(0) <= K - int(above.sum())))


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
