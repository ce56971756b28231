"""Fixed-point codes with a given number of levels: Federated QSGD (Hoenig et al. 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from numpy.random import Generator
from torch import Tensor

from flrce.core.pieces import MalformedPayload, get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.methods.compression.buffers import (
    join_spans,
    pack_bits,
    require_buffers,
    take_spans,
    unpack_bits,
)
from flrce_client.bits import count_packed_bytes
from flrce_client.fixed_point import list_coded_sizes
from flrce_client.layout import TensorSizes, count_floats, count_span_floats, split_statistics

MAX_LEVELS = 127  # 2 q + 1 symbols fit into a byte


@dataclass(frozen=True)
class FixedPointCode(Compressor):
    """x becomes s z / q: s the largest magnitude of its tensor, z a whole number from -q to q.

    z is s^-1 q x, rounded up or down at random so that its mean is right; q is `levels`. A tensor
    costs one float32 (s) and ceil(log2(2 q + 1)) bits a coordinate; most z are 0, so use `entropy`
    around it. BatchNorm's statistics travel as float32.
    """

    levels: Annotated[int, Ge(1), Le(MAX_LEVELS)] = 1

    @property
    def bits(self) -> int:
        """Bits of a symbol."""
        return (2 * self.levels).bit_length()

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"levels": self.bits}

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        coded, exact = split_statistics(layout)
        x = take_spans(u, coded)
        sizes = list_coded_sizes(layout)
        largest = [part.abs().max().reshape(1) for part in x.split(sizes)] if sizes else []
        scales = torch.cat([x.new_empty(0), *largest])
        steps = self._spread(scales, sizes)
        noise = torch.from_numpy(rng.random(len(x), dtype="float32")).to(x.device)
        # a diverged client's update travels too: the gate says why it is refused
        z = (x / steps.where(steps != 0, 1.0) + noise).floor().nan_to_num()
        symbols = (z.clamp(-self.levels, self.levels) + self.levels).byte()
        buffers = {"levels": pack_bits(symbols, self.bits), "scales": scales}
        if exact:
            buffers["statistics"] = take_spans(u, exact)
        return Payload(buffers), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator | None = None) -> Tensor:
        coded, exact = split_statistics(layout)
        require_buffers(payload, {"levels", "scales"} | ({"statistics"} if exact else set()))
        n, sizes = count_span_floats(coded), list_coded_sizes(layout)
        packed = get_buffer(payload, "levels", torch.uint8, count_packed_bytes(n, self.bits))
        scales = get_buffer(payload, "scales", torch.float32, len(sizes))
        symbols = unpack_bits(packed, self.bits, n)
        if n and int(symbols.max()) > 2 * self.levels:
            raise MalformedPayload(f"a level beyond {self.levels}")
        z = symbols.float() - self.levels
        parts = [(coded, z * self._spread(scales, sizes))]
        if exact:
            rest = count_span_floats(exact)
            parts.append((exact, get_buffer(payload, "statistics", torch.float32, rest)))
        return join_spans(parts, count_floats(layout))

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update: levels, tensors' scales, statistics."""
        coded, exact = split_statistics(layout)
        floats = len(list_coded_sizes(layout)) + count_span_floats(exact)
        levels = count_packed_bytes(count_span_floats(coded), self.bits)
        return levels + count_value_bytes(floats)

    def _spread(self, scales: Tensor, sizes: list[int]) -> Tensor:
        """(n,) the step s / q of each coordinate."""
        counts = torch.tensor(sizes, dtype=torch.long, device=scales.device)
        return (scales / self.levels).repeat_interleave(counts)
