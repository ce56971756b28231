"""Send what is not zero: a few coordinates that a client touched, and where they lie."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.pieces import MalformedPayload, get_buffer
from flrce.core.roles import Compressor
from flrce.core.types import Payload
from flrce.methods.compression.buffers import require_buffers
from flrce_client.layout import TensorSizes, count_floats

MAX_INT16_COORDINATES = 2**15  # coordinates that 16 bits can number


@dataclass(frozen=True)
class NonzeroCoordinates(Compressor):
    """Every coordinate that is not zero as float32, its number in 16 bits where that is enough,
    else in 32; exact.
    """

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        where = u.nonzero()[:, 0]
        return Payload(
            {"where": where.to(_index_dtype(count_floats(layout))), "values": u[where].float()}
        ), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator | None = None) -> Tensor:
        require_buffers(payload, {"where", "values"})
        d = count_floats(layout)
        count = payload.buffers["where"].numel()
        where = get_buffer(payload, "where", _index_dtype(d), count).long()
        if count and (int(where[0]) < 0 or int(where[-1]) >= d or bool((where.diff() <= 0).any())):
            raise MalformedPayload(f"coordinates do not ascend within 0..{d - 1}")
        u = torch.zeros(d)
        u[where] = get_buffer(payload, "values", torch.float32, count)
        return u


def _index_dtype(d: int) -> torch.dtype:
    return torch.int16 if d <= MAX_INT16_COORDINATES else torch.int32
