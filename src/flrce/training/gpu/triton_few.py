# mypy: ignore-errors
"""Convolution of few input channels for many lanes, in Triton: one sum over channels and taps
together.

A product over 3 channels fills 3 of 16 places of a matrix unit, nine times over for a 3 x 3 kernel;
over their 27 pairs it fills 27 of 32 once. Layouts as in triton_last.py; weights lie as torch has
them, (lane, O, C TAPS).
"""

import triton
import triton.language as tl

from flrce.training.gpu.triton_last import sum_pixels


@triton.jit
def load_patches(
    inputs,
    n,
    j,
    real,
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
):
    """(pixels, pairs): what output pixels n see of a lane's inputs (B, H, W, C) at the pairs j of
    (channel, tap).
    """
    b, p, q = n // (P * Q), n // Q % P, n % Q
    c, r, s = j // TAPS, j % TAPS // S, j % S
    h = (p * STEP_H - PAD_H)[:, None] + (r * DIL_H)[None, :]
    w = (q * STEP_W - PAD_W)[:, None] + (s * DIL_W)[None, :]
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & real[:, None] & (j < C * TAPS)[None, :]
    return tl.load(
        inputs + ((b * H)[:, None] + h) * (W * C) + w * C + c[None, :], mask=inside, other=0.0
    )


@triton.jit
def few_channel_convolution(
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
    BIASED: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """z (lane, B, P, Q, O) = weight * x, plus bias (lane, O) if BIASED; N pixels a lane."""
    lane = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    inputs = x + lane * (N // (P * Q)) * (H * W * C)
    total = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    for begin in range(0, C * TAPS, BLOCK_J):
        j = begin + tl.arange(0, BLOCK_J)
        seen = load_patches(
            inputs, n, j, n < N, C, H, W, P, Q, S, TAPS, STEP_H, STEP_W, PAD_H, PAD_W, DIL_H, DIL_W
        )
        held = tl.load(
            weight + (lane * O + o)[:, None] * (C * TAPS) + j[None, :],
            mask=(o < O)[:, None] & (j < C * TAPS)[None, :],
            other=0.0,
        )
        if HOW == "bf16":
            total = tl.dot(seen, tl.trans(held), total)
        else:
            total = tl.dot(seen, tl.trans(held), total, input_precision=HOW)
    if BIASED:
        total += tl.load(bias + lane * O + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    out = z + (lane * N + n) * O
    tl.store(out[:, None] + o[None, :], total, mask=(n < N)[:, None] & (o < O)[None, :])


@triton.jit
def few_channel_weight_gradient(
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
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The weight's gradient (O, C TAPS) over the part's SPAN pixels; g (lane, B, P, Q, O).

    It begins each row of out (part, lane, LONG). Programs of one tile of pairs more, if there are
    any, put behind it the sums of g, which are the bias's gradient.
    """
    part, lane = tl.program_id(2) // LANES, (tl.program_id(2) % LANES).to(tl.int64)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    inputs, grads = x + lane * (N // (P * Q)) * (H * W * C), g + lane * N * O
    at = out + (part * LANES + lane) * LONG
    end = tl.minimum(part * SPAN + SPAN, N)
    if tl.program_id(1) * BLOCK_J >= C * TAPS:
        sum_pixels(grads, at + O * C * TAPS, o, part * SPAN, end, O, BLOCK_O, BLOCK_N)
        return
    total = tl.zeros((BLOCK_O, BLOCK_J), tl.float32)
    for begin in range(part * SPAN, end, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        pushed = tl.load(
            grads + (n * O)[:, None] + o[None, :],
            mask=(n < end)[:, None] & (o < O)[None, :],
            other=0.0,
        )
        seen = load_patches(
            inputs,
            n,
            j,
            n < end,
            C,
            H,
            W,
            P,
            Q,
            S,
            TAPS,
            STEP_H,
            STEP_W,
            PAD_H,
            PAD_W,
            DIL_H,
            DIL_W,
        )
        if HOW == "bf16":
            total = tl.dot(tl.trans(pushed), seen, total)
        else:
            total = tl.dot(tl.trans(pushed), seen, total, input_precision=HOW)
    tl.store(
        at + o[:, None] * (C * TAPS) + j[None, :],
        total,
        mask=(o < O)[:, None] & (j < C * TAPS)[None, :],
    )
