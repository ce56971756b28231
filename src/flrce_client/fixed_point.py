"""Fixed-point codes (Federated QSGD), and the two codes that the server varies by round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce_client.bits import count_packed_bytes, pack_bits, unpack_bits
from flrce_client.codec import Buffers, Codec, DenseCodec, Encoded, get_buffer, require_buffers
from flrce_client.errors import MalformedPayload
from flrce_client.layout import (
    FloatArray,
    TensorSizes,
    count_floats,
    count_span_floats,
    join_spans,
    split_statistics,
    take_spans,
)


def list_coded_sizes(layout: TensorSizes) -> list[int]:
    """Floats of each tensor that is coded, in order: all but BatchNorm's statistics."""
    return [size for name, size in layout if split_statistics([(name, size)])[0]]


def split_skipped(
    layout: TensorSizes, skipped: frozenset[str]
) -> tuple[list[slice], list[tuple[str, int]]]:
    """(where the tensors that travel lie in u, their layout)."""
    spans, rest, start = [], [], 0
    for name, size in layout:
        if name not in skipped:
            spans.append(slice(start, start + size))
            rest.append((name, size))
        start += size
    return spans, rest


@dataclass(frozen=True)
class FixedPointCodec(Codec):
    """As `flrce`'s compressor `fixed-point`: the same bits in both directions."""

    levels: int = 1

    @property
    def bits(self) -> int:
        """Bits of a symbol."""
        return (2 * self.levels).bit_length()

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"levels": self.bits}

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        coded, exact = split_statistics(layout)
        x, sizes = take_spans(u, coded), list_coded_sizes(layout)
        parts = np.split(x, np.cumsum(sizes)[:-1]) if sizes else []
        scales = np.array([np.abs(part).max() for part in parts], np.float32)
        steps = self._spread(scales, sizes)
        noise = rng.random(len(x), dtype=np.float32)
        with np.errstate(all="ignore"):  # a diverged update travels too
            z = np.floor(x / np.where(steps != 0, steps, np.float32(1)) + noise)
            z = np.clip(np.nan_to_num(z), -self.levels, self.levels)
        symbols = (z + self.levels).astype(np.uint8)
        buffers: dict[str, NDArray[Any]] = {
            "levels": pack_bits(symbols, self.bits),
            "scales": scales,
        }
        if exact:
            buffers["statistics"] = take_spans(u, exact)
        return buffers, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        coded, exact = split_statistics(layout)
        require_buffers(buffers, {"levels", "scales"} | ({"statistics"} if exact else set()))
        n, sizes = count_span_floats(coded), list_coded_sizes(layout)
        packed = get_buffer(buffers, "levels", np.uint8, count_packed_bytes(n, self.bits))
        scales = get_buffer(buffers, "scales", np.float32, len(sizes))
        symbols = unpack_bits(packed, self.bits, n)
        if n and int(symbols.max()) > 2 * self.levels:
            raise MalformedPayload(f"a level beyond {self.levels}")
        z = symbols.astype(np.float32) - np.float32(self.levels)
        parts = [(coded, z * self._spread(scales, sizes))]
        if exact:
            rest = count_span_floats(exact)
            parts.append((exact, get_buffer(buffers, "statistics", np.float32, rest)))
        return join_spans(parts, count_floats(layout))

    def _spread(self, scales: FloatArray, sizes: list[int]) -> FloatArray:
        """(n,) the step s / q of each coordinate."""
        return np.repeat(scales / np.float32(self.levels), sizes)


@dataclass(frozen=True)
class GrowingBitsCodec(Codec):
    """The inner code with the precision that the task names."""

    inner: Codec = field(default_factory=FixedPointCodec)

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return self.inner.symbol_bits

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        return self.inner.encode(u, layout, rng, client_state)

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        return self.inner.decode(buffers, layout, rng)


@dataclass(frozen=True)
class SkippedLayersCodec(Codec):
    """The inner code without the tensors whose names, by commas, the task leaves out."""

    inner: Codec = field(default_factory=DenseCodec)
    skipped: str = ""

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return self.inner.symbol_bits

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        spans, rest = split_skipped(layout, frozenset(self.skipped.split(",")))
        parts = [u[:0], *(u[span] for span in spans)]
        return self.inner.encode(np.concatenate(parts), rest, rng, client_state)

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        spans, rest = split_skipped(layout, frozenset(self.skipped.split(",")))
        return join_spans([(spans, self.inner.decode(buffers, rest, rng))], count_floats(layout))
