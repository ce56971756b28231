"""Send a rotated update in a few bits: DRIVE (Vargaftik et al. 2021) and EDEN (2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import NonNegativeInt
from flrce.core.pieces import get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.methods.compression.buffers import (
    join_spans,
    pack_bits,
    pack_bits_with_torch,
    require_buffers,
    take_spans,
    unpack_bits,
)
from flrce.methods.compression.hadamard import (
    ChunkGroup,
    draw_sign_rows,
    draw_signs,
    plan_chunks,
    split_chunks,
    transform_hadamard,
)
from flrce.models.part import floor_share
from flrce_client.bits import count_packed_bytes
from flrce_client.layout import TensorSizes, count_floats, count_span_floats, split_statistics
from flrce_client.rotated import BLOCKS, CENTROID_UNIT, CENTROIDS, draw_positions, list_level_edges


@dataclass(frozen=True)
class RotatedCode(Compressor):
    """Each chunk of the update is rotated at random, and every rotated coordinate is sent in `bits`
    bits: 1, 2, 3 or 4, or between 0 and 1 the signs of such a share of them, drawn alike on both
    sides.

    After the rotation the coordinates are nearly normal, whatever the update was, so one table of
    centroids c fits all of them. A chunk costs one float32 s more: x is decoded as s D H c(H D x),
    H Hadamard's matrix and D the random signs. `scale` chooses s: "unbiased" for a mean of many
    updates, "contractive" for the least error of one, which a loop with feedback needs.
    BatchNorm's statistics travel as float32, and so does an update of fewer floats than
    `exact_below`: one bit for each of a few floats has a large error and saves little.
    """

    bits: Annotated[float, Gt(0), Le(4)] = 1
    scale: Literal["unbiased", "contractive"] = "unbiased"
    exact_below: NonNegativeInt = 0

    def __post_init__(self) -> None:
        if self.bits not in CENTROIDS and not 0 < float(self.bits) < 1:
            raise BadInput(
                f"bits = {self.bits!r}: must be 1, 2, 3 or 4, or a share between 0 and 1"
            )

    @property
    def scaled(self) -> bool:
        """Whether the error of one update may exceed the update, so that feedback would diverge."""
        return self.scale == "unbiased" and self.bits < 1

    @property
    def level_bits(self) -> int:
        """Bits of each coordinate that travels."""
        return max(1, int(self.bits))

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"levels": self.level_bits}

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        coded, exact = split_statistics(layout, self.exact_below)
        x = take_spans(u, coded)
        groups = self._plan_chunks(len(x))
        chunks = split_chunks(x * draw_signs(rng, len(x), u.device), groups)
        quantised = [self._quantise(part, rng) for part in chunks]
        levels = torch.cat([x.new_empty(0, dtype=torch.uint8), *(q for q, _ in quantised)])
        buffers = {
            "levels": pack_bits(levels, self.level_bits),
            "scales": torch.cat([x.new_empty(0), *(s for _, s in quantised)]),
        }
        if exact:
            buffers["statistics"] = take_spans(u, exact)
        return Payload(buffers), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        coded, exact = split_statistics(layout, self.exact_below)
        require_buffers(payload, {"levels", "scales"} | ({"statistics"} if exact else set()))
        n = count_span_floats(coded)
        groups = self._plan_chunks(n)
        count = self._count_levels(groups)
        packed_bytes = count_packed_bytes(count, self.level_bits)
        packed = get_buffer(payload, "levels", torch.uint8, packed_bytes)
        scales = get_buffer(payload, "scales", torch.float32, sum(g.rows for g in groups))
        signs = draw_signs(rng, n, packed.device)
        levels = unpack_bits(packed, self.level_bits, count)
        x = self._decode_groups(levels, scales, groups, rng)[:n] * signs
        parts = [(coded, x)]
        if exact:
            rest = count_span_floats(exact)
            parts.append((exact, get_buffer(payload, "statistics", torch.float32, rest)))
        return join_spans(parts, count_floats(layout))

    @property
    def encodes_batches(self) -> bool:
        return self.bits >= 1  # below it, each client sends other coordinates

    def encode_batch(
        self, updates: Tensor, layout: TensorSizes, rngs: Sequence[Generator]
    ) -> tuple[list[Payload], Tensor]:
        coded, exact = split_statistics(layout, self.exact_below)
        x = torch.cat([updates[:, span] for span in coded or [slice(0)]], 1).float()
        (K, n), groups = x.shape, self._plan_chunks(x.shape[1])
        signs = draw_sign_rows(rngs, n, x.device)
        levels, scales, rotated = [x.new_empty(K, 0).byte()], [x.new_empty(K, 0)], [x[:, :0]]
        for chunks in split_chunks(x * signs, groups):
            own_levels, own_scales = self._quantise(chunks, rngs[0])
            centroids = look_up_centroids(own_levels.view_as(chunks), self.level_bits)
            rotated.append((transform_hadamard(centroids) * own_scales[:, None]).view(K, -1))
            levels.append(own_levels.view(K, -1))
            scales.append(own_scales.view(K, -1))
        columns = {
            "levels": pack_bits_with_torch(torch.cat(levels, 1), self.level_bits),
            "scales": torch.cat(scales, 1),
        }
        if exact:
            columns["statistics"] = torch.cat([updates[:, span] for span in exact], 1).float()
        rows = {name: column.cpu() for name, column in columns.items()}
        payloads = [Payload({name: own[i] for name, own in rows.items()}) for i in range(K)]
        decoded, start = updates.float().clone(), 0  # what travels as float32 stays
        values = torch.cat(rotated, 1)[:, :n] * signs
        for span in coded:
            width = span.stop - span.start
            decoded[:, span] = values[:, start : start + width]
            start += width
        return payloads, decoded

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update: levels, a scale of each chunk, statistics."""
        coded, exact = split_statistics(layout, self.exact_below)
        groups = self._plan_chunks(count_span_floats(coded))
        floats = sum(group.rows for group in groups) + count_span_floats(exact)
        levels = count_packed_bytes(self._count_levels(groups), self.level_bits)
        return levels + count_value_bytes(floats)

    def _plan_chunks(self, n: int) -> list[ChunkGroup]:
        return plan_chunks(n, BLOCKS[self.level_bits], self.bits)

    def _quantise(self, x: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        """(levels of the coordinates that travel, row by row; scales (rows,)) of chunks x (rows,
        size) that have their signs already.
        """
        size = x.shape[1]
        y = transform_hadamard(x)
        energy = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).square()
        levels = quantise_normal(y, energy, self.level_bits)
        sent = self._draw_sent(size, rng, x.device)
        if self.scale == "unbiased":
            share = 1 if sent is None else size / len(sent)
            scales = share * energy / sum_products(y, levels, self.level_bits)
        if sent is not None:
            levels, y = levels[:, sent], y[:, sent]
        if self.scale == "contractive":
            norms = size * sum_centroid_squares(levels, self.level_bits)
            scales = sum_products(y, levels, self.level_bits) / norms
        return levels.flatten(), scales.where(energy != 0, 0.0).float()

    def _decode_groups(
        self, levels: Tensor, scales: Tensor, groups: list[ChunkGroup], rng: Generator
    ) -> Tensor:
        """(n with padding,) s H c of each chunk, still without signs."""
        parts, at, row = [scales.new_empty(0)], 0, 0
        for group in groups:
            sent = self._draw_sent(group.size, rng, levels.device)
            count = group.rows * (group.size if sent is None else len(sent))
            mine = levels[at : at + count].view(group.rows, -1)
            centroids = look_up_centroids(mine, self.level_bits)
            if sent is not None:
                full = centroids.new_zeros(group.rows, group.size)
                full[:, sent] = centroids
                centroids = full
            s = scales[row : row + group.rows, None]
            parts.append((transform_hadamard(centroids) * s).flatten())
            at, row = at + count, row + group.rows
        return torch.cat(parts)

    def _draw_sent(self, size: int, rng: Generator, device: torch.device) -> Tensor | None:
        """Which rotated coordinates of each chunk of this size travel; None: all."""
        if self.bits >= 1:
            return None
        return torch.from_numpy(draw_positions(rng, size, self.bits)).to(device)

    def _count_levels(self, groups: list[ChunkGroup]) -> int:
        if self.bits >= 1:
            return sum(group.floats for group in groups)
        return sum(group.rows * floor_share(self.bits, group.size) for group in groups)


def quantise_normal(y: Tensor, energy: Tensor, bits: int) -> Tensor:
    """Levels, uint8, of y (rows, size), whose rows have the variance `energy` (rows,); of two
    nearest centroids the upper.
    """
    if bits == 1:
        return (y >= 0).byte()
    z = y / energy.sqrt().clamp_min(torch.finfo(torch.float32).tiny).float()[:, None]
    levels = torch.zeros(y.shape, dtype=torch.uint8, device=y.device)
    for edge in list_level_edges(bits):  # a few comparisons take less time than a search
        levels += z >= edge
    return levels


def sum_products(y: Tensor, levels: Tensor, bits: int) -> Tensor:
    """(rows,) <y, c> in float64; of one bit the sum of |y|, without temporaries."""
    if bits == 1:
        total: Tensor = torch.linalg.vector_norm(y, ord=1, dim=1, dtype=torch.float64)
        return total
    return (y * look_up_centroids(levels, bits)).sum(1, dtype=torch.float64)


def sum_centroid_squares(levels: Tensor, bits: int) -> Tensor | int:
    """(rows,) <c, c> in float64."""
    if bits == 1:
        return levels.shape[1]
    return look_up_centroids(levels, bits).square().sum(1, dtype=torch.float64)


def look_up_centroids(levels: Tensor, bits: int) -> Tensor:
    """The centroid of each level, float32."""
    if bits == 1:
        return levels.float().mul_(2).sub_(1)
    table = get_centroids(bits, levels.device)
    return table.index_select(0, levels.int().flatten()).view(levels.shape)


@lru_cache
def get_centroids(bits: int, device: torch.device) -> Tensor:
    """(2^bits,) centroids in ascending order."""
    upper = torch.tensor(CENTROIDS[bits], dtype=torch.float32) / CENTROID_UNIT
    return torch.cat([-upper.flip(0), upper]).to(device)
