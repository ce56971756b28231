"""Send every coordinate in a few bits (FedCOM's quantiser, Haddadpour et al. 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from numpy.random import Generator
from torch import Tensor

from flrce.core.pieces import get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.methods.compression.buffers import pack_bits, require_buffers, unpack_bits
from flrce_client.layout import TensorSizes, count_floats
from flrce_client.quantize import quantise_tensors


@dataclass(frozen=True)
class Quantizer(Compressor):
    """2^bits levels between each tensor's least and greatest value, counted from its mean.

    A tensor costs three float32 more (mean, step, the mean's level). `stochastic` rounds up with
    the probability that makes the result unbiased, as the theory wants; without, to the nearest, as
    the authors' code does. A constant tensor, so also an update of zero, arrives exactly.
    """

    bits: Annotated[int, Ge(1), Le(8)] = 8
    stochastic: bool = True

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {"levels": self.bits}

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        sizes, draws = [size for _, size in layout], rng if self.stochastic else None
        levels, ranges = quantise_tensors(u.double().numpy(), sizes, self.bits, draws)
        packed = pack_bits(torch.from_numpy(levels), self.bits)
        return Payload({"levels": packed, "ranges": torch.from_numpy(ranges)}), client_state

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update: levels without gaps, and three floats of each
        tensor.
        """
        return -(-count_floats(layout) * self.bits // 8) + count_value_bytes(3 * len(layout))

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator | None = None) -> Tensor:
        require_buffers(payload, {"levels", "ranges"})
        sizes, d = [size for _, size in layout], count_floats(layout)
        ranges = (
            get_buffer(payload, "ranges", torch.float32, 3 * len(sizes)).double().reshape(-1, 3)
        )
        packed = get_buffer(payload, "levels", torch.uint8, -(-d * self.bits // 8))
        levels = torch.split(unpack_bits(packed, self.bits, d).double(), sizes)
        parts = [
            mean + step * (q - zero) for q, (mean, step, zero) in zip(levels, ranges, strict=True)
        ]
        return torch.cat([torch.empty(0, dtype=torch.float64), *parts]).float()
