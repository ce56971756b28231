"""Of several global models, send the one that trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.bounds import PositiveInt
from flrce.core.pieces import MalformedPayload, NoCompression, Recipe, get_buffer
from flrce.core.roles import Compressor
from flrce.core.tensor_bytes import count_value_bytes
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.models.model_groups import find_group_columns
from flrce_client.layout import TensorSizes, count_floats

INNER_PREFIX = "u."
MAX_GROUPS = 256  # what a byte can number


@dataclass(frozen=True)
class TrainedGroup(Compressor):
    """The update of the client's group, encoded by another compressor, and its number in a byte."""

    groups: PositiveInt = 2
    inner: Compressor = field(default=NoCompression(), metadata={"piece": True})
    partial: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.groups > MAX_GROUPS:
            raise BadInput(f"groups = {self.groups}: must be at most {MAX_GROUPS}")
        if self.inner.keeps_state:
            raise BadInput(
                f"inner = {type(self.inner).__name__} keeps a state for each coordinate, and a"
                " client may change its group; use a compressor without a state"
            )

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        return {INNER_PREFIX + name: bits for name, bits in self.inner.symbol_bits.items()}

    @property
    def scaled(self) -> bool:
        return self.inner.scaled

    def check_recipe(self, recipe: Recipe) -> str:
        return self.inner.check_recipe(recipe)

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        columns = find_group_columns(layout, self.groups)
        group = next((j for j in range(self.groups) if bool(u[columns[j]].any())), 0)
        names = _select_group(layout, group)
        payload, client_state = self.inner.encode(u[columns[group]], names, rng, client_state)
        inner = {INNER_PREFIX + name: buffer for name, buffer in payload.buffers.items()}
        return Payload({"group": torch.tensor([group], dtype=torch.uint8), **inner}), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        group = int(get_buffer(payload, "group", torch.uint8, 1))
        if group >= self.groups:
            raise MalformedPayload(f"group {group} of {self.groups}")
        inner = {
            name.removeprefix(INNER_PREFIX): payload.buffers[name]
            for name in payload.buffers
            if name.startswith(INNER_PREFIX)
        }
        if len(inner) + 1 != len(payload.buffers):
            raise MalformedPayload("buffers beside the group's")
        values = self.inner.decode(Payload(inner), _select_group(layout, group), rng)
        u = torch.zeros(count_floats(layout), dtype=values.dtype)
        u[find_group_columns(layout, self.groups)[group]] = values
        return u

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> int | None:
        names = _select_group(layout, 0)
        if self.inner.is_dense:
            return count_value_bytes(count_floats(names)) + 1
        inner = self.inner.estimate_bytes(names, rng)
        return None if inner is None else inner + 1

    def count_coded_floats(self, layout: TensorSizes) -> int:
        return self.inner.count_coded_floats(_select_group(layout, 0))


def _select_group(layout: TensorSizes, group: int) -> list[tuple[str, int]]:
    """Names and sizes of one group's tensors."""
    return [(name, size) for name, size in layout if name.startswith(f"members.{group}.")]
