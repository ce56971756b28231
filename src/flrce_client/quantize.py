"""Every coordinate in a few bits (FedCOM's quantiser, Haddadpour et al. 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce_client.bits import ByteArray, count_packed_bytes, pack_bits, unpack_bits
from flrce_client.codec import Buffers, Codec, Encoded, get_buffer, require_buffers
from flrce_client.layout import FloatArray, TensorSizes, count_floats

Doubles = NDArray[np.float64]


def quantise_tensors(
    u: Doubles, sizes: list[int], bits: int, rng: Generator | None
) -> tuple[ByteArray, FloatArray]:
    """(levels of all tensors (n,), three floats of each tensor); without an rng they are rounded to
    the nearest.
    """
    ranges, levels, top = [], [], 2**bits - 1
    with np.errstate(all="ignore"):  # a diverged client's update travels too
        for x in np.split(u, np.cumsum(sizes)[:-1]):
            mean, step, zero = header = find_range(x, top)
            exact = np.nan_to_num((x - mean) / step + zero) if step else np.zeros_like(x)
            up = 0.5 if rng is None else rng.random(len(x))
            levels.append(np.clip(np.floor(exact + up), 0, top).astype(np.uint8))
            ranges.append(header)
    return np.concatenate(levels), np.concatenate(ranges).astype(np.float32)


def find_range(x: Doubles, top: int) -> Doubles:
    """(mean, step, level of the mean) as they travel, in float32's values; step 0 for a constant
    tensor.
    """
    low, high = (x.min(), x.max()) if len(x) else (0.0, 0.0)
    if low == high:
        return np.array([low, 0.0, 0.0])
    step = np.float64(np.float32((high - low) / top))
    zero = np.nan_to_num((x.mean() - low) / step) if step else 0.0
    return np.array([x.mean(), step, zero]).astype(np.float32).astype(np.float64)


@dataclass(frozen=True)
class QuantizerCodec(Codec):
    """As `flrce`'s compressor `quantize`: the same bits in both directions."""

    bits: int = 8
    stochastic: bool = True

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"levels": self.bits}

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        sizes = [size for _, size in layout]
        wide = u.astype(np.float64)
        levels, ranges = quantise_tensors(wide, sizes, self.bits, rng if self.stochastic else None)
        return {"levels": pack_bits(levels, self.bits), "ranges": ranges}, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        require_buffers(buffers, {"levels", "ranges"})
        sizes, d = [size for _, size in layout], count_floats(layout)
        ranges = get_buffer(buffers, "ranges", np.float32, 3 * len(sizes)).astype(np.float64)
        packed = get_buffer(buffers, "levels", np.uint8, count_packed_bytes(d, self.bits))
        levels = unpack_bits(packed, self.bits, d).astype(np.float64)
        parts = np.split(levels, np.cumsum(sizes)[:-1])
        values = [
            mean + step * (q - zero)
            for q, (mean, step, zero) in zip(parts, ranges.reshape(-1, 3), strict=True)
        ]
        return np.concatenate([np.zeros(0), *values]).astype(np.float32)
