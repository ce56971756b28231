# mypy: ignore-errors
"""LayerNorm and RMSNorm of many lanes in Triton, in one pass: a program holds whole rows of one
lane.

A lane has N rows of WIDTH values, padded to COLS, a power of two; a program has ROWS of them at a
time.
"""

import triton
import triton.language as tl


@triton.jit
def locate_values(first, N, WIDTH: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr):
    """Rows from `first` on: where their values lie from there on (ROWS, COLS) and which there are;
    the same of rows.

    Places from `first` on are int32, which takes fewer registers.
    """
    n, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    left = first + n < N
    return n[:, None] * WIDTH + c[None, :], left[:, None] & (c < WIDTH)[None, :], n, left


@triton.jit
def forward(
    x,
    weight,
    bias,
    y,
    mean,
    scale,
    N,
    eps,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """y = (x - mean) scale weight + bias; mean, scale (lanes, N), weight, bias (lanes, WIDTH).

    Not CENTRED: the mean is taken to be 0, and not stored.
    """
    lane, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    here, mask, n, left = locate_values(first, N, WIDTH, COLS, ROWS)
    c = tl.arange(0, COLS)
    row = lane * N + first
    v = tl.load(x + row * WIDTH + here, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        center = tl.sum(v, 1) / WIDTH
        tl.store(mean + row + n, center, mask=left)
        v = tl.where(mask, v - center[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(v * v, 1) / WIDTH + eps)
    tl.store(scale + row + n, inverse, mask=left)
    v = v * inverse[:, None]
    if WEIGHT:
        v = (
            v
            * tl.load(weight + lane * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)[None, :]
        )
    if BIAS:
        v = v + tl.load(bias + lane * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row * WIDTH + here, v, mask=mask)


@triton.jit
def backward(
    x,
    g,
    weight,
    mean,
    scale,
    gx,
    by_weight,
    by_bias,
    N,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """gx; by_weight, by_bias (lanes, parts, WIDTH): sums of g times the normalised x, and of g,
    over a part's rows.

    A program has one part: TILES times ROWS rows.
    """
    lane, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, COLS)
    if WEIGHT:
        w = tl.load(weight + lane * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    scaled = tl.zeros((ROWS, COLS), tl.float32)
    plain = tl.zeros((ROWS, COLS), tl.float32)
    for i in range(TILES):
        first = (part * TILES + i) * ROWS
        here, mask, n, left = locate_values(first, N, WIDTH, COLS, ROWS)
        row = lane * N + first
        push = tl.load(g + row * WIDTH + here, mask=mask, other=0.0).to(tl.float32)
        hat = tl.load(x + row * WIDTH + here, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(scale + row + n, mask=left, other=0.0)
        if CENTRED:
            hat = hat - tl.load(mean + row + n, mask=left, other=0.0)[:, None]
        hat = tl.where(mask, hat * inverse[:, None], 0.0)
        scaled += push * hat
        plain += push
        if WEIGHT:
            push = push * w[None, :]
        moved = push - hat * (tl.sum(push * hat, 1) / WIDTH)[:, None]
        if CENTRED:
            moved = moved - (tl.sum(push, 1) / WIDTH)[:, None]
        tl.store(gx + row * WIDTH + here, moved * inverse[:, None], mask=mask)
    at = (lane * tl.num_programs(0) + part) * WIDTH + c
    tl.store(by_weight + at, tl.sum(scaled, 0), mask=c < WIDTH)
    tl.store(by_bias + at, tl.sum(plain, 0), mask=c < WIDTH)
