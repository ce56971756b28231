# mypy: ignore-errors
"""Orders of a weight's axes, in Triton: what is read and what is written lie in runs."""

import triton
import triton.language as tl


@triton.jit
def transpose_taps(x, out, LONG, A, C, T, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr):
    """x (lane, A, C, T), a lane LONG values behind the one before -> out (lane, T, C, A)."""
    COLUMNS = (C * T + BLOCK_J - 1) // BLOCK_J
    TILES = (A + BLOCK_A - 1) // BLOCK_A * COLUMNS
    lane, at = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    a = at // COLUMNS * BLOCK_A + tl.arange(0, BLOCK_A)
    j = at % COLUMNS * BLOCK_J + tl.arange(0, BLOCK_J)
    there = (a < A)[:, None] & (j < C * T)[None, :]
    value = tl.load(x + lane * LONG + a[:, None] * (C * T) + j[None, :], mask=there, other=0.0)
    place = (j % T * C + j // T) * A
    tl.store(out + lane * A * C * T + place[None, :] + a[:, None], value, mask=there)


@triton.jit
def sum_parts(
    parts,
    out,
    more,
    PARTS,
    LANES,
    M,
    T,
    O,
    AT_ONCE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """out (lane, M, T) and more (lane, O): sums in order over parts (PARTS, LANES, T M + O), rows
    of (T, M) and O.

    AT_ONCE parts are read before one has to arrive.
    """
    COLUMNS = (M + BLOCK_M - 1) // BLOCK_M
    TILES = (T + BLOCK_T - 1) // BLOCK_T * COLUMNS
    lane, at = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    t = at // COLUMNS * BLOCK_T + tl.arange(0, BLOCK_T)
    m = at % COLUMNS * BLOCK_M + tl.arange(0, BLOCK_M)
    there = (t < T)[:, None] & (m < M)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for begin in range(0, PARTS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            row = parts + ((begin + i) * LANES + lane) * (T * M + O)
            mask = there & (begin + i < PARTS)
            total += tl.load(row + t[:, None] * M + m[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + lane * M * T + m[None, :] * T + t[:, None], total, mask=there)
    if at % COLUMNS * BLOCK_M < O:  # M is at least O long
        last = tl.zeros((BLOCK_M,), tl.float32)
        for begin in range(0, PARTS, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                row = parts + ((begin + i) * LANES + lane) * (T * M + O) + T * M
                last += tl.load(row + m, mask=(m < O) & (begin + i < PARTS), other=0.0).to(
                    tl.float32
                )
        tl.store(more + lane * O + m, last, mask=(m < O) & (at < COLUMNS))
