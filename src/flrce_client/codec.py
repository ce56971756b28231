"""What all codes share: an interface, checks of buffers, and the plain one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

from flrce_client.errors import MalformedPayload
from flrce_client.layout import FloatArray, TensorSizes, count_floats

Buffers = Mapping[str, NDArray[Any]]
Encoded = tuple[dict[str, NDArray[Any]], Buffers]  # what travels, what the sender keeps


class Codec:
    """A vector <-> the buffers that travel. Both sides have the layout and draw alike."""

    @property
    def symbol_bits(self) -> Mapping[str, int]:
        """Bits of a packed symbol, by buffer."""
        return {}

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        """(the buffers of u, what the sender keeps for its next update)."""
        raise NotImplementedError

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        """(floats of the layout,) the vector; Malformed where the buffers are not its."""
        raise NotImplementedError


def get_buffer(buffers: Buffers, name: str, dtype: DTypeLike, size: int) -> NDArray[Any]:
    """One buffer, checked; Malformed says what is wrong with it."""
    if name not in buffers:
        raise MalformedPayload(f"no buffer {name!r}; got {', '.join(map(repr, sorted(buffers)))}")
    buffer = buffers[name]
    if buffer.dtype != np.dtype(dtype):
        raise MalformedPayload(f"buffer {name!r} is {buffer.dtype}, not {np.dtype(dtype)}")
    if buffer.shape != (size,):
        raise MalformedPayload(f"buffer {name!r} has shape {buffer.shape}, not ({size},)")
    return buffer


def require_buffers(buffers: Buffers, names: set[str]) -> None:
    """Malformed unless the buffers are these."""
    if set(buffers) != names:
        got = ", ".join(map(repr, sorted(buffers)))[:80] or "none"
        raise MalformedPayload(
            f"buffers {got}, not {', '.join(map(repr, sorted(names))) or 'none'}"
        )


class DenseCodec(Codec):
    """Every coordinate as float32; those of a float64 model as they are."""

    def encode(
        self, u: NDArray[Any], layout: TensorSizes, rng: Generator, client_state: Buffers
    ) -> Encoded:
        return {"u": u if u.dtype == np.float64 else u.astype(np.float32)}, client_state

    def decode(self, buffers: Buffers, layout: TensorSizes, rng: Generator) -> FloatArray:
        u = buffers.get("u", np.zeros(0, np.float32))
        wide = np.float64 if u.dtype == np.float64 else np.float32
        return get_buffer(buffers, "u", wide, count_floats(layout))
