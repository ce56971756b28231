# mypy: ignore-errors
"""Convolutions of many lanes with channels last, in Triton: the lane is a grid axis, and every sum
has a fixed order.

x (lane, B, H, W, C), z and its gradient g (lane, B, P, Q, O), weight (lane, O, C, R, S) with
TAPS = R S. A pixel is one (sample, row, column), numbered sample first; a lane has N output pixels.
GEOMETRY is (stride, padding, dilation), each as (height, width), in one tuple of six numbers. MODE
is how products are made: "bf16", "tf32" or "tf32x3" (three TF32 products, exact to about 2^-21).
"""

import triton
import triton.language as tl


@triton.jit
def add_product(total, a, b, MODE: tl.constexpr):
    """total + a b."""
    if MODE == "bf16":  # noqa: SIM108 (Triton compiles only the branch that a constant takes)
        total = tl.dot(a, b, total)
    else:
        total = tl.dot(a, b, total, input_precision=MODE)
    return total


@triton.jit
def locate_input(p, q, r, s, H: tl.constexpr, W: tl.constexpr, GEOMETRY: tl.constexpr):
    """Row and column of the input pixel that tap (r, s) of output pixel (p, q) reads, and whether
    it exists.
    """
    h = p * GEOMETRY[0] - GEOMETRY[2] + r * GEOMETRY[4]
    w = q * GEOMETRY[1] - GEOMETRY[3] + s * GEOMETRY[5]
    return h, w, (h >= 0) & (h < H) & (w >= 0) & (w < W)


@triton.jit
def locate_output(h, w, r, s, P: tl.constexpr, Q: tl.constexpr, GEOMETRY: tl.constexpr):
    """Row and column of the output pixel whose tap (r, s) reads input pixel (h, w), and whether it
    exists.
    """
    up = h + GEOMETRY[2] - r * GEOMETRY[4]
    left = w + GEOMETRY[3] - s * GEOMETRY[5]
    p, q = up // GEOMETRY[0], left // GEOMETRY[1]
    aligned = (up % GEOMETRY[0] == 0) & (left % GEOMETRY[1] == 0)
    return p, q, (up >= 0) & (left >= 0) & aligned & (p < P) & (q < Q)


@triton.jit
def convolve(
    x,
    weight,
    bias,
    z,
    N,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    TAPS: tl.constexpr,
    GEOMETRY: tl.constexpr,
    BACK: tl.constexpr,
    PHASES_H: tl.constexpr,
    PHASES_W: tl.constexpr,
    BIASED: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """z = weight * x, plus bias (lane, O) if BIASED; weight as (lane, tap, O, C).

    BACK: x is the gradient by a convolution's output, and z becomes the gradient by its input. A
    program has pixels whose rows are equal modulo PHASES_H, and whose columns modulo PHASES_W, so
    that it reads only the taps that reach them.
    """
    lane = tl.program_id(2).to(tl.int64)
    PHASES: tl.constexpr = PHASES_H * PHASES_W
    HIGH: tl.constexpr = (P + PHASES_H - 1) // PHASES_H
    WIDE: tl.constexpr = (Q + PHASES_W - 1) // PHASES_W
    B = N // (P * Q)
    n = tl.program_id(0) // PHASES * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    b, p, q = n // (HIGH * WIDE), n // WIDE % HIGH, n % WIDE
    top, side, tall, broad = 0, 0, TAPS // S, S
    if PHASES > 1:  # only every PHASES-th tap, from `top` and `side` on, reaches these pixels
        down, right = tl.program_id(0) % PHASES // PHASES_W, tl.program_id(0) % PHASES_W
        p, q = p * PHASES_H + down, q * PHASES_W + right
        top, side = (down + GEOMETRY[2]) % PHASES_H, (right + GEOMETRY[3]) % PHASES_W
        tall = (TAPS // S - top + PHASES_H - 1) // PHASES_H
        broad = (S - side + PHASES_W - 1) // PHASES_W
    real = (b < B) & (p < P) & (q < Q)
    inputs = x + (lane * B + b) * (H * W * C)
    taps = weight + lane * (TAPS * O * C)
    total = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    for i in range(tall * broad * CHUNKS):
        r, s = top + i // CHUNKS // broad * PHASES_H, side + i // CHUNKS % broad * PHASES_W
        if BACK:
            h, w, inside = locate_output(p, q, r, s, H, W, GEOMETRY)
        else:
            h, w, inside = locate_input(p, q, r, s, H, W, GEOMETRY)
        c = i % CHUNKS * BLOCK_C + tl.arange(0, BLOCK_C)
        seen = tl.load(
            (inputs + (h * W + w) * C)[:, None] + c[None, :],
            mask=(inside & real)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        tap = tl.load(
            taps + (r * S + s) * (O * C) + o[:, None] * C + c[None, :],
            mask=(o < O)[:, None] & (c < C)[None, :],
            other=0.0,
        )
        total = add_product(total, seen, tl.trans(tap), MODE)
    if BIASED:
        total += tl.load(bias + lane * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    out = z + (lane * N + (b * P + p) * Q + q) * O
    tl.store(out[:, None] + o[None, :], total, mask=real[:, None] & (o < O)[None, :])


@triton.jit
def load_pixels(x, n, c, end, WIDTH: tl.constexpr):
    """(pixels, channels): the values of x (pixels, WIDTH) at pixels n below `end`, channels c."""
    mask = (n < end)[:, None] & (c < WIDTH)[None, :]
    return tl.load(x + (n * WIDTH)[:, None] + c[None, :], mask=mask, other=0.0)


@triton.jit
def sum_pixels(
    grads, at, o, begin, end, O: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr
):
    """at[o]: the sum of grads (pixels, O) over the pixels from begin to end."""
    total = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        total += load_pixels(grads, n, o, end, O).to(tl.float32)
    tl.store(at + o, tl.sum(total, 0), mask=o < O)


@triton.jit
def weight_gradient(
    x,
    g,
    out,
    N,
    LANES,
    SPAN,
    LONG,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    TAPS: tl.constexpr,
    GEOMETRY: tl.constexpr,
    MODE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The weight's gradient (tap, O, C) over the SPAN pixels of a part.

    It is the beginning of each row of out (part, lane, LONG). Programs of one tap more, where the
    grid has them, put the sums of g behind it: the bias's gradient.
    """
    part, lane = tl.program_id(2) // LANES, (tl.program_id(2) % LANES).to(tl.int64)
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tap = tl.program_id(1)
    o = tl.program_id(0) // TILES * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    inputs, grads = x + lane * (N // (P * Q)) * (H * W * C), g + lane * N * O
    at = out + (part * LANES + lane) * LONG
    end = tl.minimum(part * SPAN + SPAN, N)
    if tap == TAPS:
        if tl.program_id(0) % TILES == 0:
            sum_pixels(grads, at + TAPS * O * C, o, part * SPAN, end, O, BLOCK_O, BLOCK_N)
        return
    total = tl.zeros((BLOCK_O, BLOCK_C), tl.float32)
    for begin in range(part * SPAN, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        b, p, q = n // (P * Q), n // Q % P, n % Q
        h, w, inside = locate_input(p, q, tap // S, tap % S, H, W, GEOMETRY)
        seen = tl.load(
            inputs + (((b * H + h) * W + w) * C)[:, None] + c[None, :],
            mask=(inside & (n < end))[:, None] & (c < C)[None, :],
            other=0.0,
        )
        total = add_product(total, tl.trans(load_pixels(grads, n, o, end, O)), seen, MODE)
    mask = (o < O)[:, None] & (c < C)[None, :]
    tl.store(at + tap * (O * C) + o[:, None] * C + c[None, :], total, mask=mask)


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
