"""Send what is not zero: a few coordinates that a client touched, and where they lie."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.compressors.buffers import Names, exactly, total
from flrce.pieces import Malformed, take
from flrce.types import Payload

SHORT = 2**15  # coordinates that 16 bits can number


@dataclass(frozen=True)
class Nonzero:
    """Every coordinate that is not zero as float32, its number in 16 bits where that is enough, else in 32; exact."""

    def encode(
        self, u: Tensor, layout: Names, rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        where = u.nonzero()[:, 0]
        return Payload({"where": where.to(_kind(total(layout))), "values": u[where].float()}), carry

    def decode(self, payload: Payload, layout: Names, rng: Generator | None = None) -> Tensor:
        exactly(payload, {"where", "values"})
        d = total(layout)
        count = payload.buffers["where"].numel()
        where = take(payload, "where", _kind(d), count).long()
        if count and (int(where[0]) < 0 or int(where[-1]) >= d or bool((where.diff() <= 0).any())):
            raise Malformed(f"coordinates do not ascend within 0..{d - 1}")
        u = torch.zeros(d)
        u[where] = take(payload, "values", torch.float32, count)
        return u


def _kind(d: int) -> torch.dtype:
    return torch.int16 if d <= SHORT else torch.int32
