"""Code another compressor's buffers without loss, so that frequent symbols cost fewer bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from numpy.random import Generator
from torch import Tensor

from flrce.core.pieces import NoCompression
from flrce.core.roles import Compressor
from flrce.core.types import Payload
from flrce.methods.compression.range_coder import decode_symbols, encode_symbols
from flrce.methods.compression.wrapping import WrappingCompressor
from flrce_client import entropy
from flrce_client.layout import TensorSizes, count_floats


@dataclass(frozen=True)
class EntropyCoded(WrappingCompressor):
    """The inner compressor's payload with every buffer coded by an adaptive range coder.

    Levels and bitmaps are coded symbol by symbol, of indices the gaps, of float32 values the
    exponents. A buffer that would not shrink travels as it is. The decoded payload is the inner
    one, bit by bit.
    """

    inner: Compressor = field(default=NoCompression(), metadata={"piece": True})
    knows_bytes: ClassVar[bool] = False
    symbol_bits: ClassVar[Mapping[str, int]] = {}  # its buffers are bytes

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, client_state: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        payload, client_state = self.inner.encode(u, layout, rng, client_state)
        widths = self.inner.symbol_bits
        coded = {
            name: compress_buffer(buffer, widths.get(name, 8))
            for name, buffer in payload.buffers.items()
        }
        return Payload(coded), client_state

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        widths = self.inner.symbol_bits
        limit = entropy.limit_buffer_bytes(count_floats(layout), len(layout))
        data = {name: buffer.numpy(force=True) for name, buffer in payload.buffers.items()}
        restored = entropy.restore_buffers(data, widths, limit, decode_symbols)
        buffers = {name: torch.from_numpy(values) for name, values in restored.items()}
        return self.inner.decode(Payload(buffers), layout, rng)

    def estimate_bytes(self, layout: TensorSizes, rng: Generator) -> None:
        return None


def compress_buffer(buffer: Tensor, bits: int) -> Tensor:
    """A buffer as bytes, by the compiled coder; as it is where that is shorter."""
    values = buffer.numpy(force=True)
    coded = entropy.compress_buffer(values, bits, encode_symbols)
    return buffer if coded is values else torch.from_numpy(coded)


def restore_buffer(buffer: Tensor, bits: int) -> Tensor:
    """The buffer that `compress_buffer` coded; Malformed where there is none."""
    data = buffer.numpy(force=True)
    values = entropy.restore_buffer(data, bits, decode_symbols)
    return buffer if values is data else torch.from_numpy(values)
