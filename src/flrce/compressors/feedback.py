"""Error feedback: what a compressor left out is added to the client's next update."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.compressors.buffers import Names, total
from flrce.errors import BadInput
from flrce.payload_bytes import count_value_bytes
from flrce.pieces import Compressor, Dense, Recipe
from flrce.traits import Changing, Covers, KnowsBytes, Partial, Scales
from flrce.types import Payload

RESIDUAL = "residual"


@dataclass(frozen=True)
class ErrorFeedback:
    """The inner compressor with a memory; the residual stays with the client, also while it is not chosen."""

    inner: Compressor = field(default=Dense(), metadata={"piece": True})

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise BadInput(f"inner = {self.inner!r}: must be a compressor")
        if isinstance(self.inner, Scales) and self.inner.scaled:
            raise BadInput("error feedback on scaled values would add the scaling's own error up; set scaled = false")

    @property
    def partial(self) -> bool:
        return isinstance(self.inner, Partial) and self.inner.partial

    def objection(self, recipe: Recipe) -> str:
        """Residuals belong to coordinates, so every round must send the same ones."""
        for piece in (recipe.submodel, recipe.trainer):
            if isinstance(piece, Changing) and piece.changing:
                return (
                    f"error feedback keeps a residual per coordinate, but {type(piece).__name__} gives a client other "
                    "coordinates in every round; use the compressor without it"
                )
        return ""

    def encode(
        self, u: Tensor, layout: Names, rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        residual = carry.get(RESIDUAL)
        if residual is not None and residual.shape == u.shape and bool(residual.isfinite().all()):
            u = u + residual
        there = copy.deepcopy(rng)
        payload, carry = self.inner.encode(u, layout, rng, carry)
        return payload, {**carry, RESIDUAL: u - self.inner.decode(payload, layout, there)}

    def decode(self, payload: Payload, layout: Names, rng: Generator) -> Tensor:
        return self.inner.decode(payload, layout, rng)

    def estimate_bytes(self, layout: Names, rng: Generator) -> int | None:
        """As the inner compressor's payload, if that is known."""
        if type(self.inner) is Dense:
            return count_value_bytes(total(layout))
        return self.inner.estimate_bytes(layout, rng) if isinstance(self.inner, KnowsBytes) else None

    def covers(self, layout: Names, rng: Generator) -> Tensor:
        """(d,) bool: the coordinates that count in the mean."""
        if isinstance(self.inner, Covers):
            return self.inner.covers(layout, rng)
        return torch.ones(total(layout), dtype=torch.bool)
