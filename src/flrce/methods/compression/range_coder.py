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

from flrce.core.c_compiler import (
    COMPILER_FLAGS,
    KernelUnavailable,
    find_compiler,
    load_or_build_library,
)
from flrce_client.bits import ByteArray
from flrce_client.range_coder import MAX_BITS_OF_BYTE as MAX_BITS_OF_BYTE
from flrce_client.range_coder import (
    choose_history,
    decode_with_python,
    encode_with_python,
    require_enough_bytes,
    require_exact_end,
)

SOURCE = Path(__file__).with_name("range_coder.c")
log = logging.getLogger("flrce")


def encode_symbols(symbols: ByteArray, bits: int) -> ByteArray:
    """The bytes of symbols (n,) below 2^bits."""
    history, code = choose_history(bits), _load_library()
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
    require_enough_bytes(data, n, bits)
    history, code = choose_history(bits), _load_library()
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
    require_exact_end(data, n, shifted, bounds)
    return symbols


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
