"""Codes that send some coordinates: the largest, random ones, those that are not zero."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce_client.bits import ByteArray, count_packed_bytes, floor_share, pack_bits, unpack_bits
from flrce_client.codec import Buffers, Codec, Encoded, get_buffer, require_buffers
from flrce_client.errors import MalformedPayload
from flrce_client.golomb import choose_golomb_bits, pack_gaps, unpack_positions
from flrce_client.layout import (
    BATCHNORM_SUFFIXES,
    FloatArray,
    TensorSizes,
    count_floats,
    count_span_floats,
    join_spans,
    split_statistics,
    take_spans,
)
from flrce_client.rotated import draw_positions

MAX_INT16_COORDINATES = 2**15  # coordinates that 16 bits can number
FLOAT_BYTES = INDEX_BYTES = 4
SAMPLE_STRIDE = 16  # of many magnitudes, one in so many is looked at first


def mask_largest(u: NDArray[Any], K: int) -> NDArray[np.bool_]:
    """(d,) bool: the K largest magnitudes, NaN above all; among equals the lowest index."""
    if len(u) <= K:
        return np.ones(len(u), bool)
    size = np.abs(u)
    if np.isnan(size.max()):
        size = np.nan_to_num(size, nan=np.inf, posinf=np.inf)
    edge = find_largest(size, K)
    mask: NDArray[np.bool_] = size >= edge
    spare = int(np.count_nonzero(mask)) - K
    if spare:  # of the equal ones the last go
        mask[np.flatnonzero(size == edge)[-spare:]] = False
    return mask


def find_largest(size: NDArray[Any], K: int) -> Any:
    """The K-th largest of these. Most are put aside by a bound that a sample of them gives."""
    sample = size[::SAMPLE_STRIDE]
    rank = len(sample) - 1 - (2 * K // SAMPLE_STRIDE + SAMPLE_STRIDE)
    if rank > 0:
        likely = size[size > np.partition(sample, rank)[rank]]
        size = likely if len(likely) >= K else size
    return np.partition(size, len(size) - K)[len(size) - K]


def count_coded_bytes(coding: str, d: int, K: int, bits: int | None = None) -> int:
    """Bytes of K of d values and of where they lie; values of `bits` have a range of two floats."""
    if coding == "dense":
        return FLOAT_BYTES * d
    places = count_packed_bytes(d, 1) if coding == "bitmap" else INDEX_BYTES * K
    if bits is not None:
        return count_packed_bytes(K, bits) + 2 * FLOAT_BYTES + places
    return FLOAT_BYTES * K + places


def choose_coding(coding: str, d: int, K: int, bits: int | None) -> str:
    """How positions are coded: as it is set, or "auto" the shortest."""
    if coding != "auto":
        return coding
    codings = ("dense", "bitmap", "indices") if bits is None else ("bitmap", "indices")
    return min(codings, key=lambda one: count_coded_bytes(one, d, K, bits))


@dataclass(frozen=True)
class TopKCodec(Codec):
    """As `flrce`'s compressor `topk`; quantised values may differ by a rounding of their range."""

    keep: float = 0.6
    coding: str = "auto"
    dense_bn: bool = False
    bits: int | None = None

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"bitmap": 1, "levels": self.bits or 8}

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        d = self._count_candidates(layout)
        rest = {"statistics": u[d:].astype(np.float32)} if self.dense_bn else {}
        u = u[:d].astype(np.float32)
        K = floor_share(self.keep, d) if d else 0
        kept, coding = mask_largest(u, K), choose_coding(self.coding, d, K, self.bits)
        if coding == "dense":
            return {"dense": np.where(kept, u, np.float32(0)), **rest}, client_state
        where = np.packbits(kept) if coding == "bitmap" else np.flatnonzero(kept).astype(np.int32)
        if self.bits is None:
            return {coding: where, "values": u[kept], **rest}, client_state
        levels, ranges = quantise_magnitudes(u[kept], self.bits)
        return {
            coding: where,
            "levels": pack_bits(levels, self.bits),
            "ranges": ranges,
            **rest,
        }, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        d, D = self._count_candidates(layout), count_floats(layout)
        K = floor_share(self.keep, d) if d else 0
        coding = choose_coding(self.coding, d, K, self.bits)
        values_in = {"values"} if self.bits is None else {"levels", "ranges"}
        promised = {coding} if coding == "dense" else {coding} | values_in
        require_buffers(buffers, promised | ({"statistics"} if self.dense_bn else set()))
        u = np.zeros(D, np.float32)
        if coding == "dense":
            u[:d] = get_buffer(buffers, "dense", np.float32, d)
            if int(np.count_nonzero(u[:d])) > K:
                raise MalformedPayload(f"more than the {K} values that were asked for are not zero")
        else:
            where = (read_bitmap if coding == "bitmap" else read_indices)(buffers, d, K)
            u[:d][where] = self._decode_values(buffers, K)
        if self.dense_bn:
            u[d:] = get_buffer(buffers, "statistics", np.float32, D - d)
        return u

    def _decode_values(self, buffers: Buffers, K: int) -> FloatArray:
        if self.bits is None:
            return get_buffer(buffers, "values", np.float32, K)
        size = count_packed_bytes(K, self.bits)
        levels = unpack_bits(get_buffer(buffers, "levels", np.uint8, size), self.bits, K)
        return restore_magnitudes(levels, get_buffer(buffers, "ranges", np.float32, 2), self.bits)

    def _count_candidates(self, layout: TensorSizes) -> int:
        """How many coordinates K is picked from; running statistics come last in a layout."""
        suffixes = tuple(f".{suffix}" for suffix in BATCHNORM_SUFFIXES)
        return sum(n for name, n in layout if not (self.dense_bn and name.endswith(suffixes)))


def read_bitmap(buffers: Buffers, d: int, K: int) -> NDArray[Any]:
    """(d,) bool, K of them True."""
    marks = np.unpackbits(get_buffer(buffers, "bitmap", np.uint8, count_packed_bytes(d, 1)))
    if marks[d:].any() or int(marks.sum()) != K:
        raise MalformedPayload(f"bitmap marks {int(marks.sum())} of {d} coordinates, not {K}")
    return marks[:d].astype(bool)


def read_indices(buffers: Buffers, d: int, K: int) -> NDArray[Any]:
    """(K,) ascending coordinates."""
    where = get_buffer(buffers, "indices", np.int32, K).astype(np.int64)
    require_ascending(where, d, "indices")
    return where


def require_ascending(where: NDArray[np.int64], d: int, name: str) -> None:
    """Malformed unless the coordinates ascend within 0..d - 1."""
    if len(where) and (where[0] < 0 or where[-1] >= d or (np.diff(where) <= 0).any()):
        raise MalformedPayload(f"{name} do not ascend within 0..{d - 1}")


def quantise_magnitudes(values: FloatArray, bits: int) -> tuple[ByteArray, FloatArray]:
    """(levels: the sign's bit, 1 for a plus, then those of the magnitude's level; (least magnitude,
    step) float32). One bit has no levels: the mean magnitude, and a step of 0.
    """
    size, top = np.abs(values.astype(np.float64)), 2 ** (bits - 1) - 1
    if not len(values):
        return np.zeros(0, np.uint8), np.zeros(2, np.float32)
    signs = (values >= 0).astype(np.uint8)
    if not top:
        return signs, np.array([size.mean(), 0.0]).astype(np.float32)
    low = np.float64(np.float32(size.min()))
    step = np.float64(np.float32((size.max() - low) / top))
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.nan_to_num((size - low) / step, nan=0.0, posinf=0.0, neginf=0.0)
    levels = np.clip(np.round(exact), 0, top).astype(np.uint8)
    return signs << np.uint8(bits - 1) | levels, np.array([low, step]).astype(np.float32)


def restore_magnitudes(levels: ByteArray, ranges: FloatArray, bits: int) -> FloatArray:
    """What `quantise_magnitudes` quantised, to half a step."""
    low, step = ranges.astype(np.float64)
    size = low + step * (levels & np.uint8(2 ** (bits - 1) - 1)).astype(np.float64)
    values = np.where(levels >> np.uint8(bits - 1) == 1, size, -size)
    rounded: FloatArray = values.astype(np.float32)
    return rounded


@dataclass(frozen=True)
class RandomKCodec(Codec):
    """As `flrce`'s compressor `randomk`."""

    keep: float = 0.1
    scaled: bool = False

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        where = draw_positions(rng, count_floats(layout), self.keep)
        return {"values": u.astype(np.float32)[where]}, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        require_buffers(buffers, {"values"})
        d = count_floats(layout)
        where = draw_positions(rng, d, self.keep)
        u = np.zeros(d, np.float32)
        factor = np.float32(d / len(where) if self.scaled else 1.0)
        u[where] = get_buffer(buffers, "values", np.float32, len(where)) * factor
        return u


@dataclass(frozen=True)
class TernaryCodec(Codec):
    """As `flrce`'s compressor `ternary`; the magnitude may differ in its last bit, as the mean is
    summed in another order.
    """

    share: float = 0.01

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        coded, exact = split_statistics(layout)
        x = take_spans(u, coded)
        count = self._count_kept(len(x))
        where = np.flatnonzero(mask_largest(x, count))
        kept = x[where]
        magnitude = np.abs(kept.astype(np.float64)).mean() if count else 0.0
        gaps = np.diff(where, prepend=-1) - 1
        quotients, remainders = pack_gaps(gaps, choose_golomb_bits(len(x), count))
        buffers: dict[str, NDArray[Any]] = {
            "quotients": quotients,
            "remainders": remainders,
            "signs": pack_bits((kept >= 0).astype(np.uint8), 1),
            "magnitude": np.array([magnitude], np.float32),
        }
        return buffers | ({"statistics": take_spans(u, exact)} if exact else {}), client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        coded, exact = split_statistics(layout)
        names = {"quotients", "remainders", "signs", "magnitude"}
        require_buffers(buffers, names | ({"statistics"} if exact else set()))
        n = count_span_floats(coded)
        count = self._count_kept(n)
        packed = get_buffer(buffers, "signs", np.uint8, count_packed_bytes(count, 1))
        signs = unpack_bits(packed, 1, count).astype(np.float32)
        quotients = get_buffer(buffers, "quotients", np.uint8, buffers["quotients"].size)
        size = count_packed_bytes(count, choose_golomb_bits(n, count))
        remainders = get_buffer(buffers, "remainders", np.uint8, size)
        x = np.zeros(n, np.float32)
        magnitude = get_buffer(buffers, "magnitude", np.float32, 1)
        x[unpack_positions(quotients, remainders, n, count)] = (2 * signs - 1) * magnitude
        parts = [(coded, x)]
        if exact:
            rest = count_span_floats(exact)
            parts.append((exact, get_buffer(buffers, "statistics", np.float32, rest)))
        return join_spans(parts, count_floats(layout))

    def _count_kept(self, n: int) -> int:
        return floor_share(self.share, n) if n else 0


@dataclass(frozen=True)
class NonzeroCodec(Codec):
    """As `flrce`'s compressor `nonzero`."""

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        where = np.flatnonzero(u)
        kind = choose_index_dtype(count_floats(layout))
        return {"where": where.astype(kind), "values": u[where].astype(np.float32)}, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        require_buffers(buffers, {"where", "values"})
        d, count = count_floats(layout), buffers["where"].size
        where = get_buffer(buffers, "where", choose_index_dtype(d), count).astype(np.int64)
        require_ascending(where, d, "coordinates")
        u = np.zeros(d, np.float32)
        u[where] = get_buffer(buffers, "values", np.float32, count)
        return u


def choose_index_dtype(d: int) -> type[np.int16] | type[np.int32]:
    """16 bits where they can number all coordinates."""
    return np.int16 if d <= MAX_INT16_COORDINATES else np.int32


@dataclass(frozen=True)
class TensorDropoutCodec(Codec):
    """As `flrce`'s compressor `drop-tensors`."""

    rate: float = 0.325
    coverage: bool = False

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        kept = self._draw_sent_mask(layout, rng)
        return ({"values": u.astype(np.float32)[kept]} if kept.any() else {}), client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        kept = self._draw_sent_mask(layout, rng)
        require_buffers(buffers, {"values"} if kept.any() else set())
        u = np.zeros(len(kept), np.float32)
        if kept.any():
            u[kept] = get_buffer(buffers, "values", np.float32, int(kept.sum()))
        return u

    def _draw_sent_mask(self, layout: TensorSizes, rng: Generator) -> NDArray[np.bool_]:
        sizes = [size for _, size in layout]
        return np.repeat(rng.random(len(sizes)) >= self.rate, sizes)
