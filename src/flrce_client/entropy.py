"""Buffers coded without loss, so that frequent symbols cost fewer bits."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce_client.bits import ByteArray, count_packed_bytes, pack_bits, unpack_bits
from flrce_client.errors import MalformedPayload
from flrce_client.layout import FloatArray
from flrce_client.range_coder import decode_symbols, encode_symbols

#: how a buffer was coded: its first byte
STORED, LEVELS, FLOATS, INTEGERS, SHORTS = range(5)
#: bits that are looked at together before they are coded, how many such windows there must be, and
#: how far from a half the share of ones may be: 5 standard deviations of a fair coin's
BALANCE_WINDOW, MIN_BALANCED_WINDOWS, MAX_IMBALANCE = 1024, 8, 0.08
MIN_VALUES = 16  # of a float or integer buffer: a shorter one travels as it is
GAP_BITS = 7  # a symbol of an integer: the number of its digits, and the one behind the first
Encoder = Callable[[ByteArray, int], ByteArray]  # symbols, bits -> bytes
Decoder = Callable[[ByteArray, int, int], ByteArray]  # bytes, number of symbols, bits -> symbols


def limit_buffer_bytes(floats: int, tensors: int) -> int:
    """The most bytes that a restored buffer of a task can need."""
    return 8 * floats + 64 * tensors + 4096


def compress_buffer(
    values: NDArray[Any], bits: int, encode: Encoder = encode_symbols
) -> NDArray[Any]:
    """A buffer as bytes: how it was coded, its number of values, and the code; as it is where that
    is shorter, bytes behind STORED. `bits`: of a symbol in a buffer of bytes.
    """
    if values.ndim != 1 or (values.dtype != np.uint8 and len(values) < MIN_VALUES):
        return values
    if values.dtype == np.uint8:
        coded = _code_levels(values, bits, encode)
    elif values.dtype == np.float32:
        coded = _code_floats(values, encode)
    elif values.dtype in (np.int32, np.int16):
        coded = _code_integers(values, encode)
    else:
        return values
    if len(coded) < values.nbytes:
        return coded
    if values.dtype != np.uint8:
        return values
    return np.concatenate([np.array([STORED], np.uint8), values])


def count_symbols(data: NDArray[Any], bits: int) -> int:
    """Symbols that a coded buffer claims to hold; 0: it is not coded, or has no head."""
    if data.dtype != np.uint8 or data.ndim != 1 or len(data) < 2 or not int(data[0]):
        return 0
    count, _ = _read_number(data[1:6])
    return count * 8 // bits if int(data[0]) == LEVELS else count


def restore_buffers(
    buffers: Mapping[str, NDArray[Any]],
    widths: Mapping[str, int],
    most: int,
    decode: Decoder = decode_symbols,
) -> dict[str, NDArray[Any]]:
    """All buffers of a payload; Malformed where they claim more than `most` symbols together. That
    is asked before any is restored: a few bytes can claim very many symbols.
    """
    count = sum(count_symbols(data, widths.get(name, 8)) for name, data in buffers.items())
    if count > most:
        raise MalformedPayload(f"{count} coded symbols, more than the {most} of any code")
    return {
        name: restore_buffer(data, widths.get(name, 8), decode) for name, data in buffers.items()
    }


def restore_buffer(data: NDArray[Any], bits: int, decode: Decoder = decode_symbols) -> NDArray[Any]:
    """The buffer that `compress_buffer` coded; Malformed where there is none."""
    if data.dtype != np.uint8 or data.ndim != 1:
        return data
    kind = int(data[0]) if len(data) else -1
    if kind == STORED:
        return data[1:].copy()
    if kind not in (LEVELS, FLOATS, INTEGERS, SHORTS):
        raise MalformedPayload(f"a coded buffer of an unknown kind, {kind}")
    count, rest = _read_number(data[1:])
    if kind == LEVELS:
        return _restore_levels(rest, count, bits, decode)
    if kind == FLOATS:
        return _restore_floats(rest, count, decode)
    return _restore_integers(rest, count, np.int32 if kind == INTEGERS else np.int16, decode)


def _code_levels(packed: ByteArray, bits: int, encode: Encoder) -> ByteArray:
    """The symbols of packed bytes; 3, 5, 6 or 7 bits may leave some bits of the last byte."""
    count = len(packed) * 8 // bits
    whole = packed[: count_packed_bytes(count, bits)]
    if np.unpackbits(packed[-1:])[8 - (8 * len(packed) - count * bits) :].any():
        return packed  # no packed symbols
    symbols = unpack_bits(whole, bits, count)
    if bits == 1 and is_balanced(symbols):
        return packed  # there is nothing to gain
    return np.concatenate([_write_head(LEVELS, len(packed)), encode(symbols, bits)])


def is_balanced(bits: ByteArray) -> bool:
    """Whether about half of many bits are set everywhere, as in rotated codes: at most 2 % could be
    gained.
    """
    windows = len(bits) // BALANCE_WINDOW
    if windows < MIN_BALANCED_WINDOWS:
        return False
    ones = bits[: windows * BALANCE_WINDOW].reshape(windows, -1).sum(1, dtype=np.int64)
    return bool((np.abs(ones / BALANCE_WINDOW - 0.5) < MAX_IMBALANCE).all())


def _restore_levels(data: ByteArray, size: int, bits: int, decode: Decoder) -> ByteArray:
    count = size * 8 // bits
    packed = pack_bits(decode(data, count, bits), bits)
    return np.pad(packed, (0, size - len(packed)))


def _code_floats(values: NDArray[np.float32], encode: Encoder) -> ByteArray:
    """Exponents as symbols; sign and digits, three bytes each, as they are."""
    raw = values.astype("<f4").view("<u4")
    exponents = encode((raw >> 23 & 0xFF).astype(np.uint8), 8)
    rest = (raw >> 8 & 0x800000 | raw & 0x7FFFFF).astype("<u4").view(np.uint8).reshape(-1, 4)
    head = _write_head(FLOATS, len(values))
    return np.concatenate([head, rest[:, :3].flatten(), exponents])


def _restore_floats(data: ByteArray, count: int, decode: Decoder) -> FloatArray:
    if len(data) < 3 * count:
        raise MalformedPayload(f"{len(data)} bytes are too few for {count} coded floats")
    rest = np.zeros((count, 4), np.uint8)
    rest[:, :3] = data[: 3 * count].reshape(count, 3)
    low = rest.reshape(-1).view("<u4")
    exponents = decode(data[3 * count :], count, 8).astype("<u4")
    raw = (low & 0x800000) << 8 | exponents << 23 | low & 0x7FFFFF
    return raw.astype("<u4").view("<f4").astype(np.float32)


def _code_integers(indices: NDArray[Any], encode: Encoder) -> ByteArray:
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
    return np.concatenate([*head, packed, encode(symbols, GAP_BITS)])


def _restore_integers(
    data: ByteArray, count: int, dtype: type[np.generic], decode: Decoder
) -> NDArray[Any]:
    size, data = _read_number(data)
    symbols = decode(data[size:], count, GAP_BITS).astype(np.int64)
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
    return wide.astype(np.uint32).view(np.int32).astype(dtype)


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
