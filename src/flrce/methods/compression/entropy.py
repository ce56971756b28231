"""Code another compressor's buffers without loss, so that frequent symbols cost fewer bits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from flrce.core.pieces import MalformedPayload, NoCompression, Recipe
from flrce.core.roles import Compressor
from flrce.core.types import Payload
from flrce.errors import BadInput
from flrce.methods.compression.buffers import (
    TensorSizes,
    count_floats,
    count_packed_bytes,
    pack_bits,
    unpack_bits,
)
from flrce.methods.compression.range_coder import ByteArray, decode_symbols, encode_symbols

#: how a buffer was coded: its first byte
STORED, LEVELS, FLOATS, INTEGERS, SHORTS = range(5)
MIN_VALUES = 16  # of a float or integer buffer: a shorter one travels as it is
GAP_BITS = 7  # a symbol of an integer: the number of its digits, and the one behind the first


@dataclass(frozen=True)
class EntropyCoded(Compressor):
    """The inner compressor's payload with every buffer coded by an adaptive range coder.

    Levels and bitmaps are coded symbol by symbol, of indices the gaps, of float32 values the
    exponents. A buffer that would not shrink travels as it is. The decoded payload is the inner
    one, bit by bit.
    """

    inner: Compressor = field(default=NoCompression(), metadata={"piece": True})

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

    def check_recipe(self, recipe: Recipe) -> str:
        return self.inner.check_recipe(recipe)

    def encode(
        self, u: Tensor, layout: TensorSizes, rng: Generator, carry: Mapping[str, Tensor]
    ) -> tuple[Payload, Mapping[str, Tensor]]:
        payload, carry = self.inner.encode(u, layout, rng, carry)
        widths = self.inner.symbol_bits
        coded = {
            name: code_buffer(buffer, widths.get(name, 8))
            for name, buffer in payload.buffers.items()
        }
        return Payload(coded), carry

    def decode(self, payload: Payload, layout: TensorSizes, rng: Generator) -> Tensor:
        widths, most = self.inner.symbol_bits, 8 * count_floats(layout) + 64 * len(layout) + 4096
        # of all buffers together, before any is restored: a few bytes can claim very many symbols
        count = sum(
            count_symbols(buffer, widths.get(name, 8)) for name, buffer in payload.buffers.items()
        )
        if count > most:
            raise MalformedPayload(f"{count} coded symbols, more than the {most} of any code")
        buffers = {
            name: restore_buffer(buffer, widths.get(name, 8))
            for name, buffer in payload.buffers.items()
        }
        return self.inner.decode(Payload(buffers), layout, rng)

    def coverage_mask(self, layout: TensorSizes, rng: Generator) -> Tensor | None:
        """(d,) bool: the coordinates that count in the mean; None: all."""
        return self.inner.coverage_mask(layout, rng)


def code_buffer(buffer: Tensor, bits: int) -> Tensor:
    """A buffer as bytes: how it was coded, its number of values, and the code; as it is where that
    is shorter, bytes behind STORED. `bits`: of a symbol in a buffer of bytes.
    """
    values = buffer.numpy(force=True)
    if values.ndim != 1 or (values.dtype != np.uint8 and len(values) < MIN_VALUES):
        return buffer
    if values.dtype == np.uint8:
        coded = _code_levels(values, bits)
    elif values.dtype == np.float32:
        coded = _code_floats(values)
    elif values.dtype in (np.int32, np.int16):
        coded = _code_integers(values)
    else:
        return buffer
    if len(coded) < values.nbytes:
        return torch.from_numpy(coded)
    if values.dtype != np.uint8:
        return buffer
    return torch.from_numpy(np.concatenate([np.array([STORED], np.uint8), values]))


def count_symbols(buffer: Tensor, bits: int) -> int:
    """Symbols that a coded buffer claims to hold; 0: it is not coded, or has no head."""
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or len(buffer) < 2 or not int(buffer[0]):
        return 0
    count, _ = _read_number(buffer[1:6].numpy(force=True))
    return count * 8 // bits if int(buffer[0]) == LEVELS else count


def restore_buffer(buffer: Tensor, bits: int) -> Tensor:
    """The buffer that `code_buffer` coded; Malformed where there is none."""
    if buffer.dtype != torch.uint8 or buffer.ndim != 1:
        return buffer
    data = buffer.numpy(force=True)
    kind = int(data[0]) if len(data) else -1
    if kind == STORED:
        return torch.from_numpy(data[1:].copy())
    if kind not in (LEVELS, FLOATS, INTEGERS, SHORTS):
        raise MalformedPayload(f"a coded buffer of an unknown kind, {kind}")
    count, rest = _read_number(data[1:])
    if kind == LEVELS:
        return _restore_levels(rest, count, bits)
    if kind == FLOATS:
        return _restore_floats(rest, count)
    return _restore_integers(rest, count, np.int32 if kind == INTEGERS else np.int16)


def _code_levels(packed: ByteArray, bits: int) -> ByteArray:
    """The symbols of packed bytes; 3, 5, 6 or 7 bits may leave some bits of the last byte."""
    count = len(packed) * 8 // bits
    whole = torch.from_numpy(packed[: count_packed_bytes(count, bits)])
    if np.unpackbits(packed[-1:])[8 - (8 * len(packed) - count * bits) :].any():
        return packed  # no packed symbols
    symbols = unpack_bits(whole, bits, count).numpy()
    return np.concatenate([_write_head(LEVELS, len(packed)), encode_symbols(symbols, bits)])


def _restore_levels(data: ByteArray, size: int, bits: int) -> Tensor:
    count = size * 8 // bits
    packed = pack_bits(torch.from_numpy(decode_symbols(data, count, bits)), bits)
    return torch.nn.functional.pad(packed, (0, size - len(packed)))


def _code_floats(values: NDArray[np.float32]) -> ByteArray:
    """Exponents as symbols; sign and digits, three bytes each, as they are."""
    raw = values.astype("<f4").view("<u4")
    exponents = encode_symbols((raw >> 23 & 0xFF).astype(np.uint8), 8)
    rest = (raw >> 8 & 0x800000 | raw & 0x7FFFFF).astype("<u4").view(np.uint8).reshape(-1, 4)
    head = _write_head(FLOATS, len(values))
    return np.concatenate([head, rest[:, :3].flatten(), exponents])


def _restore_floats(data: ByteArray, count: int) -> Tensor:
    if len(data) < 3 * count:
        raise MalformedPayload(f"{len(data)} bytes are too few for {count} coded floats")
    rest = np.zeros((count, 4), np.uint8)
    rest[:, :3] = data[: 3 * count].reshape(count, 3)
    low = rest.reshape(-1).view("<u4")
    exponents = decode_symbols(data[3 * count :], count, 8).astype("<u4")
    raw = (low & 0x800000) << 8 | exponents << 23 | low & 0x7FFFFF
    return torch.from_numpy(raw.astype("<u4").view("<f4").astype(np.float32))


def _code_integers(indices: NDArray[np.int32] | NDArray[np.int16]) -> ByteArray:
    """Gaps between neighbours, from -1 on, as numbers of 1 to 2^32. Of a gap's binary digits 1xyy..
    their number and x are one symbol; the y travel as they are, the lowest of all gaps first.
    """
    wide = indices.astype(np.int64)
    kind = INTEGERS if indices.dtype == np.int32 else SHORTS
    values = (np.diff(wide, prepend=-1) - 1 & 0xFFFFFFFF) + 1
    digits = np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1  # behind the first
    tails = np.maximum(digits - 1, 0)
    symbols = (2 * digits + (values >> tails & (digits > 0))).astype(np.uint8)
    planes = [(values >> place & 1)[tails > place] for place in range(int(tails.max()))]
    packed = np.packbits(np.concatenate([np.zeros(0, np.int64), *planes]).astype(np.uint8))
    head = [_write_head(kind, len(values)), _write_number(len(packed))]
    return np.concatenate([*head, packed, encode_symbols(symbols, GAP_BITS)])


def _restore_integers(data: ByteArray, count: int, dtype: type[np.generic]) -> Tensor:
    size, data = _read_number(data)
    symbols = decode_symbols(data[size:], count, GAP_BITS).astype(np.int64)
    digits, second = symbols // 2, symbols % 2
    tails = np.maximum(digits - 1, 0)
    if (digits > 32).any() or (second > digits).any():
        raise MalformedPayload("coded gaps are not numbers of 1 to 33 binary digits")
    bits, total = np.unpackbits(data[:size]), int(tails.sum())
    if size != count_packed_bytes(total, 1) or len(data) < size or bits[total:].any():
        raise MalformedPayload(f"{size} bytes are not what {total} binary digits need")
    values, at = np.where(digits > 0, 2 + second, 1) << tails, 0
    for place in range(int(tails.max(initial=0))):
        mine = tails > place
        count = int(mine.sum())
        values[mine] |= bits[at : at + count].astype(np.int64) << place
        at += count
    wide = np.cumsum(values) - 1
    return torch.from_numpy(wide.astype(np.uint32).view(np.int32).astype(dtype))


def _write_head(kind: int, count: int | None = None) -> ByteArray:
    head = np.array([kind], np.uint8)
    return head if count is None else np.concatenate([head, _write_number(count)])


def _write_number(number: int) -> ByteArray:
    """Seven bits a byte, the lowest first; all but the last have their highest bit set."""
    out = []
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return np.array([*out, number], np.uint8)


def _read_number(data: ByteArray) -> tuple[int, ByteArray]:
    number = 0
    for i, byte in enumerate(data[:5].tolist()):
        number |= (byte & 127) << 7 * i
        if byte < 128:
            return number, data[i + 1 :]
    raise MalformedPayload("a coded buffer ends within its head")
