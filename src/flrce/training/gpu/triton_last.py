# mypy: ignore-errors
"""Convolution of any width for many lanes, channels last, in Triton: the lane is a grid axis, sums
keep their order.

x (lane, B, H, W, C), z (lane, B, P, Q, O); a pixel is one (sample, row, column), numbered sample
first. Both factors of a product are read along the channels that it sums over, as the matrix units
want them.
"""

import triton
import triton.language as tl


@triton.jit
def convolution(
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
    STEP_H: tl.constexpr,
    STEP_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DIL_H: tl.constexpr,
    DIL_W: tl.constexpr,
    BACK: tl.constexpr,
    PHASES_H: tl.constexpr,
    PHASES_W: tl.constexpr,
    BIASED: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """z = weight * x, plus bias (lane, O) if BIASED; N pixels a lane; weight (lane, tap, O, C).

    BACK: x is the gradient by a convolution's output, z by its input. Pixels whose rows are equal
    modulo PHASES_H, and whose columns modulo PHASES_W, are a program's own.
    """
    lane = tl.program_id(2).to(tl.int64)
    PHASES: tl.constexpr = PHASES_H * PHASES_W
    HIGH: tl.constexpr = (P + PHASES_H - 1) // PHASES_H
    WIDE: tl.constexpr = (Q + PHASES_W - 1) // PHASES_W
    B = N // (P * Q)
    n = tl.program_id(0) // PHASES * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    b, p, q = n // (HIGH * WIDE), n // WIDE % HIGH, n % WIDE
    if (
        PHASES > 1
    ):  # only every PHASES-th tap, from `top` and `side` on, reaches pixels of the program's phase
        down, right = tl.program_id(0) % PHASES // PHASES_W, tl.program_id(0) % PHASES_W
        p, q = p * PHASES_H + down, q * PHASES_W + right
        top, side = (down + PAD_H) % PHASES_H, (right + PAD_W) % PHASES_W
        tall, broad = (
            (TAPS // S - top + PHASES_H - 1) // PHASES_H,
            (S - side + PHASES_W - 1) // PHASES_W,
        )
    else:
        top, side, tall, broad = 0, 0, TAPS // S, S
    real = (b < B) & (p < P) & (q < Q)
    c = tl.arange(0, BLOCK_C)
    inputs = x + (lane * B + b) * (H * W * C)
    taps = weight + lane * (TAPS * O * C)
    total = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    for it in range(tall * broad * CHUNKS):
        begin = it % CHUNKS * BLOCK_C
        r, s = top + it // CHUNKS // broad * PHASES_H, side + it // CHUNKS % broad * PHASES_W
        tap = r * S + s
        if BACK:
            up, left = p + PAD_H - r * DIL_H, q + PAD_W - s * DIL_W
            h, w = up // STEP_H, left // STEP_W
            inside = (
                (up >= 0)
                & (left >= 0)
                & (up % STEP_H == 0)
                & (left % STEP_W == 0)
                & (h < H)
                & (w < W)
            )
        else:
            h, w = p * STEP_H - PAD_H + r * DIL_H, q * STEP_W - PAD_W + s * DIL_W
            inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
        inside = inside & real
        channel = begin + c
        seen = tl.load(
            (inputs + (h * W + w) * C)[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < C)[None, :],
            other=0.0,
        )
        held = tl.load(
            taps + tap * (O * C) + o[:, None] * C + channel[None, :],
            mask=(o < O)[:, None] & (channel < C)[None, :],
            other=0.0,
        )
        if HOW == "bf16":
            total = tl.dot(seen, tl.trans(held), total)
        else:
            total = tl.dot(seen, tl.trans(held), total, input_precision=HOW)
    if BIASED:
        total += tl.load(bias + lane * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    out = z + (lane * N + (b * P + p) * Q + q) * O
    tl.store(out[:, None] + o[None, :], total, mask=real[:, None] & (o < O)[None, :])


@triton.jit
def sum_pixels(
    grads, at, o, begin, end, O: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr
):
    """at[o]: the sum of grads (pixels, O) over the pixels from begin to end."""
    total = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        there = (n < end)[:, None] & (o < O)[None, :]
        total += tl.load(grads + (n * O)[:, None] + o[None, :], mask=there, other=0.0).to(
            tl.float32
        )
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
    STEP_H: tl.constexpr,
    STEP_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DIL_H: tl.constexpr,
    DIL_W: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The weight's gradient (tap, O, C) over the part's SPAN pixels; g (lane, B, P, Q, O).

    It begins each row of out (part, lane, LONG). Programs of one tap more, if there are any, put
    behind it the sums of g, which are the bias's gradient.
    """
    part, lane = tl.program_id(2) // LANES, (tl.program_id(2) % LANES).to(tl.int64)
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tap = tl.program_id(1)
    o = tl.program_id(0) // TILES * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    r, s = tap // S, tap % S
    B = N // (P * Q)
    inputs, grads = x + lane * B * (H * W * C), g + lane * N * O
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
        h, w = p * STEP_H - PAD_H + r * DIL_H, q * STEP_W - PAD_W + s * DIL_W
        real = n < end
        inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & real
        pushed = tl.load(
            grads + (n * O)[:, None] + o[None, :], mask=real[:, None] & (o < O)[None, :], other=0.0
        )
        seen = tl.load(
            inputs + (((b * H + h) * W + w) * C)[:, None] + c[None, :],
            mask=inside[:, None] & (c < C)[None, :],
            other=0.0,
        )
        if HOW == "bf16":
            total = tl.dot(tl.trans(pushed), seen, total)
        else:
            total = tl.dot(tl.trans(pushed), seen, total, input_precision=HOW)
    tl.store(
        at + tap * (O * C) + o[:, None] * C + c[None, :],
        total,
        mask=(o < O)[:, None] & (c < C)[None, :],
    )


@triton.jit
def unfold_rows(
    x,
    out,
    MANY,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    S: tl.constexpr,
    TAPS: tl.constexpr,
    STEP_H: tl.constexpr,
    STEP_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DIL_H: tl.constexpr,
    DIL_W: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out (samples P Q, TAPS, C): what each output pixel sees of x (samples, H, W, C); MANY times
    (pixel, tap).
    """
    t = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    n, tap = t // TAPS, t % TAPS
    b, p, q = n // (P * Q), n // Q % P, n % Q
    h, w = p * STEP_H - PAD_H + tap // S * DIL_H, q * STEP_W - PAD_W + tap % S * DIL_W
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (t < MANY)
    at = ((b * H + h) * W + w).to(tl.int64) * C
    seen = tl.load(x + at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
    tl.store(
        out + t.to(tl.int64)[:, None] * C + c[None, :],
        seen,
        mask=(t < MANY)[:, None] & (c < C)[None, :],
    )


@triton.jit
def fold_rows(
    spread,
    out,
    MANY,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STEP_H: tl.constexpr,
    STEP_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DIL_H: tl.constexpr,
    DIL_W: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out (samples, H, W, C): for each value the sum of what taps spread to it, (samples P Q, R S,
    C); MANY pixels.
    """
    n = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    b, h, w = n // (H * W), n // W % H, n % W
    total = tl.zeros((PLACES, BLOCK_C), tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            up, left = h + PAD_H - r * DIL_H, w + PAD_W - s * DIL_W
            p, q = up // STEP_H, left // STEP_W
            inside = (
                (up >= 0)
                & (left >= 0)
                & (up % STEP_H == 0)
                & (left % STEP_W == 0)
                & (p < P)
                & (q < Q)
            )
            at = (((b * P + p) * Q + q).to(tl.int64) * (R * S) + (r * S + s)) * C
            there = (inside & (n < MANY))[:, None] & (c < C)[None, :]
            total += tl.load(spread + at[:, None] + c[None, :], mask=there, other=0.0).to(
                tl.float32
            )
    tl.store(
        out + n.to(tl.int64)[:, None] * C + c[None, :],
        total,
        mask=(n < MANY)[:, None] & (c < C)[None, :],
    )
