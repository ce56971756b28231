"""Error feedback: what a compressor left out is added to the client's next update."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from numpy.random import Generator
from torch import Tensor

from flrce.core.pieces import NoCompression, Recipe
from flrce.core.roles import Compressor
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.methods.compression.wrapping import WrappingCompressor
from flrce_client.layout import TensorSizes

RESIDUAL_KEY = "residual"


@dataclass(frozen=True)
class ErrorFeedback(WrappingCompressor):
    """The inner compressor with a memory; the residual stays with the client, also while it is not
    chosen.
    """

    inner: Compressor = field(default=NoCompression(), metadata={"piece": True})

    keeps_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.scaled:
            raise BadInput(
                "error feedback on scaled values would add the scaling's own error up; set scaled ="
                " false (randomk) or scale = 'contractive' (rotated)"
            )

    def check_recipe(self, recipe: Recipe) -> str:
        """Residuals belong to coordinates, so every round must send the same ones."""
        for piece in (recipe.submodel, recipe.trainer):
            if piece.changes_coordinates:
                return (
                    f"error feedback keeps a residual per coordinate, but {type(piece).__name__}"
                    " gives a client other coordinates in every round; use the compressor"
                    " without it"
                )
        return super().check_recipe(recipe)

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        residual = client_state.get(RESIDUAL_KEY)
        if residual is not None and residual.shape == u.shape and bool(residual.isfinite().all()):
            u = u + residual
        there = copy.deepcopy(rng)
        payload, client_state = self.inner.encode(u, layout, rng, client_state)
        return payload, {
            **client_state,
            RESIDUAL_KEY: u - self.inner.decode(payload, layout, there),
        }
