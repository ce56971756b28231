"""A lossless coder for symbols of a few bits: an adaptive binary range coder, in plain Python.

A symbol is coded bit by bit, the highest first. The probability of each bit is learnt from the
symbols so far: there is an estimate for every prefix of the symbol and every value of the last
`history` bits. So no histogram travels, and the code follows statistics that change along the
vector, as they do from tensor to tensor. All arithmetic is on integers, so every machine writes and
reads the same bytes. The coder is that of Mahoney's lpaq: 32-bit bounds without carry. flrce has
the same coder in C, some hundred times faster.
"""

import numpy as np

from flrce_client.bits import ByteArray
from flrce_client.errors import MalformedPayload

MIN_HISTORY_BITS = 4  # of the past that a probability depends on; at least one whole symbol
LEAST, MOST = 32, 65_504  # probabilities, in 65536ths
PATIENCE = 60  # an estimate moves by 1 / (1.5 + times it was used) of the way, at least 1 / 61.5
TOP = 0xFFFFFFFF
#: a bit of a symbol costs at least -log2(65504 / 65536) = 0.0007 bits, so a byte holds at most
#: 11,361; twice as many are allowed for rounding
MAX_BITS_OF_BYTE = 22_722


def choose_history(bits: int) -> int:
    """Bits of the past that a probability depends on."""
    return max(bits, MIN_HISTORY_BITS)


def encode_symbols(symbols: ByteArray, bits: int) -> ByteArray:
    """The bytes of symbols (n,) below 2^bits."""
    return encode_with_python(symbols, bits, choose_history(bits))


def decode_symbols(data: ByteArray, n: int, bits: int) -> ByteArray:
    """The n symbols of these bytes; Malformed where n symbols need more or fewer bytes."""
    require_enough_bytes(data, n, bits)
    symbols, shifted, bounds = decode_with_python(data, n, bits, choose_history(bits))
    require_exact_end(data, n, shifted, bounds)
    return symbols


def require_enough_bytes(data: ByteArray, n: int, bits: int) -> None:
    """Malformed where no code of n symbols is so short; asked before memory is taken for them."""
    if n * bits > MAX_BITS_OF_BYTE * (len(data) + 4):
        raise MalformedPayload(f"{len(data)} coded bytes are too few for {n} symbols")


def require_exact_end(data: ByteArray, n: int, shifted: int, bounds: tuple[int, int]) -> None:
    """Malformed unless the bytes behind those shifted in are the shortest that end the code."""
    if shifted < 0 or data[shifted:].tobytes() != shortest_between(*bounds):
        raise MalformedPayload(f"{len(data)} coded bytes are not what {n} symbols need")


def encode_with_python(symbols: ByteArray, bits: int, history: int) -> ByteArray:
    """As flrce's range_coder.c."""
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
    return np.frombuffer(bytes(out) + shortest_between(low, high), np.uint8)


def decode_with_python(
    data: ByteArray, n: int, bits: int, history: int
) -> tuple[ByteArray, int, tuple[int, int]]:
    """As flrce's range_coder.c: (the symbols, how many bytes were shifted in behind the first
    four, the bounds at the end); -2 bytes where n symbols need more than there are.
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


def shortest_between(low: int, high: int) -> bytes:
    """The first bytes of the number in [low, high] that ends in the most zero bytes."""
    for length in (1, 2, 3):
        rest = (1 << 32 - 8 * length) - 1
        value = (low + rest) & ~rest
        if value <= high:
            return value.to_bytes(4, "big")[:length]
    return low.to_bytes(4, "big")
