"""Compressors around another one: what such a piece does not say itself, `inner` says."""

from collections.abc import Mapping

from numpy.random import Generator
from torch import Tensor

from flrce.core.pieces import Recipe
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce_client.layout import TensorSizes, count_floats


class WrappingCompressor(Compressor):
    """A compressor with another one, its field `inner`. A piece overrides what differs."""

    inner: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise BadInput(f"inner = {self.inner!r}: must be a compressor")

    @property
    def partial(self) -> bool:
        return self.inner.partial

    @property
    def scaled(self) -> bool:
        return self.inner.scaled

    @property
    def keeps_state(self) -> bool:
        return self.inner.keeps_state

    @property
    def knows_bytes(self) -> bool:
        return self.inner.knows_bytes

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return self.inner.symbol_bits

    def check_recipe(self, recipe: Recipe) -> str:
        return self.inner.check_recipe(recipe)

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        return self.inner.encode(u, layout, rng, client_state)

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        return self.inner.decode(payload, layout, rng)

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int | None:
        if self.inner.is_dense:
            return count_value_bytes(count_floats(layout))
        return self.inner.estimate_bytes(layout, rng)

    def coverage_mask(self, layout: TensorSizes, rng: Generator) -> Tensor | None:
        return self.inner.coverage_mask(layout, rng)
