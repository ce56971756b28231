"""Rotated codes in a few bits: DRIVE (Vargaftik et al. 2021) and EDEN (2022)."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce_client.bits import ByteArray, count_packed_bytes, floor_share, pack_bits, unpack_bits
from flrce_client.codec import Buffers, Codec, Encoded, get_buffer, require_buffers
from flrce_client.hadamard import (
    ChunkGroup,
    draw_signs,
    plan_chunks,
    split_chunks,
    transform_hadamard,
)
from flrce_client.layout import (
    FloatArray,
    TensorSizes,
    count_floats,
    count_span_floats,
    join_spans,
    split_statistics,
    take_spans,
)

#: Lloyd-Max centroids of the normal distribution, the positive half, in units of 1/1024. Sums of
#: 4096 such numbers are exact in float32, so the order of additions cannot matter in `decode`.
#: One bit needs the sign only; the scale holds the centroid.
CENTROIDS = {
    1: (1024,),
    2: (464, 1547),
    3: (251, 774, 1376, 2204),
    4: (131, 397, 673, 965, 1286, 1657, 2119, 2798),
}
CENTROID_UNIT = 1024
#: floats that are rotated together and have one scale, by the bits of a level: the more, the fewer
#: scales; the error is the same from 256 on
BLOCKS = {1: 16_384, 2: 4096, 3: 4096, 4: 4096}
TINY = float(np.finfo(np.float32).tiny)


def list_level_edges(bits: int) -> list[float]:
    """Where one level ends and the next begins, ascending, in units of a standard deviation."""
    edges = [-(a + b) / 2 for a, b in pairwise(reversed(CENTROIDS[bits]))]
    edges = [*edges, 0.0, *(-edge for edge in reversed(edges))]
    return [edge / CENTROID_UNIT for edge in edges]


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """As `flrce`'s compressor `rotated`. Decoding gives the same bits; an encoded scale may differ
    from torch's in its last bit, and with it a level that lies on an edge, as sums are taken in
    another order.
    """

    bits: float = 1
    scale: str = "unbiased"
    exact_below: int = 0

    @property
    def level_bits(self) -> int:
        return max(1, int(self.bits))

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"levels": self.level_bits}

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        coded, exact = split_statistics(layout, self.exact_below)
        x = take_spans(u, coded)
        groups = self._plan_chunks(len(x))
        chunks = split_chunks(x * draw_signs(rng, len(x)), groups)
        quantised = [self._quantise(part, rng) for part in chunks]
        levels = np.concatenate([np.zeros(0, np.uint8), *(q for q, _ in quantised)])
        scales = np.concatenate([np.zeros(0, np.float32), *(s for _, s in quantised)])
        buffers = {"levels": pack_bits(levels, self.level_bits), "scales": scales}
        return buffers | ({"statistics": take_spans(u, exact)} if exact else {}), client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        coded, exact = split_statistics(layout, self.exact_below)
        require_buffers(buffers, {"levels", "scales"} | ({"statistics"} if exact else set()))
        n = count_span_floats(coded)
        groups = self._plan_chunks(n)
        count = self._count_levels(groups)
        size = count_packed_bytes(count, self.level_bits)
        packed = get_buffer(buffers, "levels", np.uint8, size)
        scales = get_buffer(buffers, "scales", np.float32, sum(g.rows for g in groups))
        signs = draw_signs(rng, n)
        levels = unpack_bits(packed, self.level_bits, count)
        x = self._decode_groups(levels, scales, groups, rng)[:n] * signs
        parts = [(coded, x)]
        if exact:
            rest = count_span_floats(exact)
            parts.append((exact, get_buffer(buffers, "statistics", np.float32, rest)))
        return join_spans(parts, count_floats(layout))

    def _plan_chunks(self, n: int) -> list[ChunkGroup]:
        return plan_chunks(n, BLOCKS[self.level_bits], self.bits)

    def _quantise(self, x: FloatArray, rng: Generator) -> tuple[ByteArray, FloatArray]:
        """(levels of the coordinates that travel, row by row; scales (rows,)) of chunks x (rows,
        size) that have their signs already.
        """
        size, y = x.shape[1], transform_hadamard(x)
        energy = np.square(x, dtype=np.float64).sum(1)
        levels = self._choose_levels(y, energy)
        sent = self._draw_sent(size, rng)
        products = y * self._look_up_centroids(levels)
        with np.errstate(divide="ignore", invalid="ignore"):  # chunks of zeros
            if self.scale == "unbiased":
                share = 1 if sent is None else size / len(sent)
                scales = share * energy / products.sum(1, dtype=np.float64)
            if sent is not None:
                levels, products = levels[:, sent], products[:, sent]
            if self.scale == "contractive":
                norms = np.square(self._look_up_centroids(levels)).sum(1, dtype=np.float64)
                scales = products.sum(1, dtype=np.float64) / (size * norms)
        return levels.reshape(-1), np.where(energy != 0, scales, 0.0).astype(np.float32)

    def _choose_levels(self, y: FloatArray, energy: NDArray[np.float64]) -> ByteArray:
        """Of two nearest centroids the upper."""
        if self.level_bits == 1:
            return (y >= 0).astype(np.uint8)
        z = y / np.maximum(np.sqrt(energy), TINY).astype(np.float32)[:, None]
        levels = np.zeros(y.shape, np.uint8)
        for edge in list_level_edges(self.level_bits):
            levels += z >= np.float32(edge)
        return levels

    def _look_up_centroids(self, levels: ByteArray) -> FloatArray:
        if self.level_bits == 1:
            return 2 * levels.astype(np.float32) - 1
        upper = np.array(CENTROIDS[self.level_bits], np.float32) / np.float32(CENTROID_UNIT)
        table: FloatArray = np.concatenate([-upper[::-1], upper])
        return table[levels]

    def _decode_groups(
        self, levels: ByteArray, scales: FloatArray, groups: list[ChunkGroup], rng: Generator
    ) -> FloatArray:
        """(n with padding,) s H c of each chunk, still without signs."""
        parts, at, row = [np.zeros(0, np.float32)], 0, 0
        for group in groups:
            sent = self._draw_sent(group.size, rng)
            count = group.rows * (group.size if sent is None else len(sent))
            centroids = self._look_up_centroids(levels[at : at + count].reshape(group.rows, -1))
            if sent is not None:
                full = np.zeros((group.rows, group.size), np.float32)
                full[:, sent] = centroids
                centroids = full
            s = scales[row : row + group.rows, None]
            parts.append((transform_hadamard(centroids) * s).reshape(-1))
            at, row = at + count, row + group.rows
        return np.concatenate(parts)

    def _draw_sent(self, size: int, rng: Generator) -> NDArray[np.int64] | None:
        """Which rotated coordinates of each chunk of this size travel; None: all."""
        return None if self.bits >= 1 else draw_positions(rng, size, self.bits)

    def _count_levels(self, groups: list[ChunkGroup]) -> int:
        if self.bits >= 1:
            return sum(group.floats for group in groups)
        return sum(group.rows * floor_share(self.bits, group.size) for group in groups)


def draw_positions(rng: Generator, size: int, share: float) -> NDArray[np.int64]:
    """Such a share of the positions 0 to size - 1, ascending; both sides draw alike."""
    return np.sort(rng.permutation(size)[: floor_share(share, size)])
