"""Leave whole tensors out of an upload (PyramidFL's upload dropout, Li et al. 2022)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import Proportion
from flrce.core.pieces import get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.methods.compression.buffers import require_buffers
from flrce_client.layout import TensorSizes


@dataclass(frozen=True)
class TensorDropout(Compressor):
    """Each tensor is sent with probability 1 - rate; both sides draw which, so what is left out
    weighs nothing.

    A tensor left out counts as unchanged, as in the authors' code; with `coverage` the mean is over
    those who sent it.
    """

    rate: Proportion = 0.325
    coverage: bool = False

    @property
    def partial(self) -> bool:
        return self.coverage and self.rate > 0

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        kept = self._draw_sent_mask(layout, rng)
        return Payload({"values": u.float()[kept]} if kept.any() else {}), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        kept = self._draw_sent_mask(layout, rng)
        require_buffers(payload, {"values"} if kept.any() else set())
        u = torch.zeros(len(kept))
        if kept.any():
            u[kept] = get_buffer(payload, "values", torch.float32, int(kept.sum()))
        return u

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int:
        """What a payload weighs, whatever the update: both sides draw which tensors travel."""
        return count_value_bytes(int(self._draw_sent_mask(layout, rng).sum()))

    def coverage_mask(self, layout: TensorSizes, rng: Generator) -> Tensor | None:
        return self._draw_sent_mask(layout, rng) if self.coverage else None

    def _draw_sent_mask(self, layout: TensorSizes, rng: Generator) -> Tensor:
        sizes = torch.tensor([size for _, size in layout], dtype=torch.long)
        return torch.from_numpy(rng.random(len(sizes)) >= self.rate).repeat_interleave(sizes)
