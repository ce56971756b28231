"""Of several global models, the code of the one that trained."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flrce_client.codec import Buffers, Codec, DenseCodec, Encoded, get_buffer
from flrce_client.errors import MalformedPayload
from flrce_client.layout import FloatArray, TensorSizes, count_floats

INNER_PREFIX = "u."


@dataclass(frozen=True)
class TrainedGroupCodec(Codec):
    """The floats of one model by an inner code, and the model's number in a byte."""

    groups: int = 2
    inner: Codec = field(default_factory=DenseCodec)

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        masks = [_mask_group(layout, j) for j in range(self.groups)]
        group = next((j for j, mask in enumerate(masks) if u[mask].any()), 0)
        names = _select_group(layout, group)
        buffers, client_state = self.inner.encode(u[masks[group]], names, rng, client_state)
        inner = {INNER_PREFIX + name: buffer for name, buffer in buffers.items()}
        return {"group": np.array([group], np.uint8), **inner}, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        group = int(get_buffer(buffers, "group", np.uint8, 1)[0])
        if group >= self.groups:
            raise MalformedPayload(f"group {group} of {self.groups}")
        inner = {
            name.removeprefix(INNER_PREFIX): buffer
            for name, buffer in buffers.items()
            if name.startswith(INNER_PREFIX)
        }
        if len(inner) + 1 != len(buffers):
            raise MalformedPayload("buffers beside the group's")
        values = self.inner.decode(inner, _select_group(layout, group), rng)
        u = np.zeros(count_floats(layout), values.dtype)
        u[_mask_group(layout, group)] = values
        return u


def _is_of_group(name: str, group: int) -> bool:
    return name.startswith(f"members.{group}.")


def _select_group(layout: TensorSizes, group: int) -> TensorSizes:
    """Names and sizes of one group's tensors."""
    return tuple((name, size) for name, size in layout if _is_of_group(name, group))


def _mask_group(layout: TensorSizes, group: int) -> NDArray[np.bool_]:
    """(floats of the layout,) which of them are the group's."""
    names = [_is_of_group(name, group) for name, _ in layout]
    return np.repeat(names, [size for _, size in layout])
