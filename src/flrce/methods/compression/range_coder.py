"""A lossless coder for symbols of a few bits: an adaptive binary range coder, compiled where there
is a C compiler.

A symbol is coded bit by bit, the highest first. The probability of each bit is learnt from the
symbols so far: there is an estimate for every prefix of the symbol and every value of the last
`history` bits. So no histogram travels, and the code follows statistics that change along the
vector, as they do from tensor to tensor. All arithmetic is on integers, so every machine writes and
reads the same bytes. The coder is that of Mahoney's lpaq: 32-bit bounds without carry.
"""

import ctypes
import logging
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flrce.core.c_compiler import (
    COMPILER_FLAGS,
    KernelUnavailable,
    find_compiler,
    load_or_build_library,
)
from flrce.core.pieces import MalformedPayload

ByteArray = NDArray[np.uint8]
MIN_HISTORY_BITS = 4  # of the past that a probability depends on; at least one whole symbol
LEAST, MOST = 32, 65_504  # probabilities, in 65536ths
PATIENCE = 60  # an estimate moves by 1 / (1.5 + times it was used) of the way, at least 1 / 61.5
TOP = 0xFFFFFFFF
#: a bit of a symbol costs at least -log2(65504 / 65536) = 0.0007 bits, so a byte holds at most
#: 11,361; twice as many are allowed for rounding
MAX_BITS_OF_BYTE = 22_722
SOURCE = Path(__file__).with_name("range_coder.c")
log = logging.getLogger("flrce")


def encode_symbols(symbols: ByteArray, bits: int) -> ByteArray:
    """The bytes of symbols (n,) below 2^bits."""
    history, code = max(bits, MIN_HISTORY_BITS), _load_library()
    if code is None:
        return encode_with_python(symbols, bits, history)
    symbols = np.ascontiguousarray(symbols)
    room = 64 + 2 * bits * len(symbols)  # a bit costs at most -log2(32 / 65536) = 11 bits, seldom
    while True:
        out = np.empty(room, np.uint8)
        written = code.encode_symbols(
            symbols.ctypes.data, len(symbols), bits, history, out.ctypes.data, room
        )
        if written >= 0:
            return out[:written].copy()
        room *= 2


def decode_symbols(data: ByteArray, n: int, bits: int) -> ByteArray:
    """The n symbols of these bytes; Malformed where n symbols need more or fewer bytes."""
    if n * bits > MAX_BITS_OF_BYTE * (len(data) + 4):  # before memory is taken for them
        raise MalformedPayload(f"{len(data)} coded bytes are too few for {n} symbols")
    history, code = max(bits, MIN_HISTORY_BITS), _load_library()
    if code is None:
        symbols, shifted, bounds = decode_with_python(data, n, bits, history)
    else:
        data, symbols, ends = np.ascontiguousarray(data), np.empty(n, np.uint8), np.zeros(2, "u4")
        shifted = code.decode_symbols(
            *(data.ctypes.data, len(data), symbols.ctypes.data, n, bits, history), ends.ctypes.data
        )
        if shifted == -1:
            raise MemoryError("no memory for the range coder's table")
        bounds = (int(ends[0]), int(ends[1]))
    if shifted < 0 or data[shifted:].tobytes() != _shortest_between(*bounds):
        raise MalformedPayload(f"{len(data)} coded bytes are not what {n} symbols need")
    return symbols


def encode_with_python(symbols: ByteArray, bits: int, history: int) -> ByteArray:
    """As range_coder.c."""
    low, high, past, mask, out = 0, TOP, 0, (1 << history) - 1, bytearray()
    chances, counts = [32_768] * (1 << history + bits), [0] * (1 << history + bits)
    for symbol in symbols.tolist():
        node, base = 1, (past & mask) << bits
        for place in range(bits - 1, -1, -1):
            at, bit = base | node, symbol >> place & 1
            middle = _split(low, high, chances[at])
            low, high = (low, middle) if bit else (middle + 1, high)
            _learn(chances, counts, at, bit)
            node = node * 2 + bit
            while not (low ^ high) >> 24:
                out.append(high >> 24)
                low, high = low << 8 & TOP, high << 8 & TOP | 255
        past = past << bits | symbol
        past &= mask
    return np.frombuffer(bytes(out) + _shortest_between(low, high), np.uint8)


def decode_with_python(
    data: ByteArray, n: int, bits: int, history: int
) -> tuple[ByteArray, int, tuple[int, int]]:
    """As range_coder.c: (the symbols, how many bytes were shifted in behind the first four, the
    bounds at the end); -2 bytes where n symbols need more than there are.
    """
    low, high, past, mask = 0, TOP, 0, (1 << history) - 1
    chances, counts = [32_768] * (1 << history + bits), [0] * (1 << history + bits)
    source = data.tobytes() + bytes(4)
    value, read, symbols = int.from_bytes(source[:4], "big"), 4, bytearray()
    for _ in range(n):
        node, base = 1, (past & mask) << bits
        for _ in range(bits):
            at = base | node
            middle = _split(low, high, chances[at])
            bit = int(value <= middle)
            low, high = (low, middle) if bit else (middle + 1, high)
            _learn(chances, counts, at, bit)
            node = node * 2 + bit
            while not (low ^ high) >> 24:
                if read - 4 >= len(data):
                    return np.frombuffer(bytes(symbols), np.uint8), -2, (low, high)
                low, high = low << 8 & TOP, high << 8 & TOP | 255
                value = value << 8 & TOP | (source[read] if read < len(source) else 0)
                read += 1
        symbols.append(node - (1 << bits))
        past = (past << bits | symbols[-1]) & mask
    return np.frombuffer(bytes(symbols), np.uint8), read - 4, (low, high)


def _split(low: int, high: int, chance: int) -> int:
    span = high - low
    return low + (span >> 16) * chance + ((span & 0xFFFF) * chance >> 16)


def _learn(chances: list[int], counts: list[int], at: int, bit: int) -> None:
    step = ((65_535 if bit else 0) - chances[at]) * (131_072 // (2 * counts[at] + 3))
    chances[at] = min(max(chances[at] + (step >> 16), LEAST), MOST)
    counts[at] = min(counts[at] + 1, PATIENCE)


def _shortest_between(low: int, high: int) -> bytes:
    """The first bytes of the number in [low, high] that ends in the most zero bytes."""
    for length in (1, 2, 3):
        rest = (1 << 32 - 8 * length) - 1
        value = (low + rest) & ~rest
        if value <= high:
            return value.to_bytes(4, "big")[:length]
    return low.to_bytes(4, "big")


@cache
def _load_library() -> Any:
    """The compiled coder; None: there is no compiler, and Python codes."""
    try:
        command = [find_compiler(), *COMPILER_FLAGS]
        path = load_or_build_library(SOURCE.read_text(), command, platform.machine())
        code: Any = ctypes.CDLL(str(path))
    except (KernelUnavailable, OSError) as why:
        log.info("the entropy coder runs in Python, some hundred times slower: %s", why)
        return None
    pointer, long = ctypes.c_void_p, ctypes.c_long
    code.encode_symbols.argtypes = [pointer, long, ctypes.c_int, ctypes.c_int, pointer, long]
    code.decode_symbols.argtypes = [
        *(pointer, long, pointer, long, ctypes.c_int, ctypes.c_int),
        pointer,
    ]
    code.encode_symbols.restype = code.decode_symbols.restype = long
    return code
