# mypy: ignore-errors
"""Convolution of any width for many lanes in Triton: the lane is a grid axis, every sum has a fixed order.

x (lane, B, C, H, W), z (lane, B, O, P, Q); a pixel is one (sample, row, column), numbered sample first. Weights come as
(lane, R S, O, C), so that a tile of them is read along C. Products are made of tiles by tl.dot: in float32 of three
TF32 products each, whose error is float32's.
"""

import triton
import triton.language as tl


@triton.jit
def products(x, weight, bias, z, N, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr,
             P: tl.constexpr, Q: tl.constexpr, S: tl.constexpr, TAPS: tl.constexpr, STEP_H: tl.constexpr,
             STEP_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
             BACK: tl.constexpr, BIAS: tl.constexpr, HOW: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_C: tl.constexpr):  # fmt: skip
    """z = weight * x + bias, N pixels a lane. BACK: x is the gradient by a convolution's output, z by its input."""
    lane = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    b, p, q = n // (P * Q), n // Q % P, n % Q
    c = tl.arange(0, BLOCK_C)
    B = N // (P * Q)
    inputs = x + lane * B * (C * H * W) + b.to(tl.int64) * (C * H * W)
    taps = weight + lane * (TAPS * O * C)
    total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    CHUNKS: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    for it in range(TAPS * CHUNKS):
        tap, begin = it // CHUNKS, it % CHUNKS * BLOCK_C
        r, s = tap // S, tap % S
        if BACK:
            up, left = p + PAD_H - r * DIL_H, q + PAD_W - s * DIL_W
            h, w = up // STEP_H, left // STEP_W
            inside = (up >= 0) & (left >= 0) & (up % STEP_H == 0) & (left % STEP_W == 0) & (h < H) & (w < W)
        else:
            h, w = p * STEP_H - PAD_H + r * DIL_H, q * STEP_W - PAD_W + s * DIL_W
            inside = (h >= 0) & (h < H) & (w >= 0) & (w < W)
        inside = inside & (n < N)
        channel = begin + c
        at = inputs + (h * W + w)
        seen = tl.load(
            at[None, :] + channel[:, None] * (H * W), mask=inside[None, :] & (channel < C)[:, None], other=0.0
        )
        held = tl.load(taps + tap * (O * C) + o[:, None] * C + channel[None, :],
                       mask=(o < O)[:, None] & (channel < C)[None, :], other=0.0)  # fmt: skip
        if HOW == "bf16":
            total += tl.dot(held.to(tl.bfloat16), seen.to(tl.bfloat16))
        else:
            total += tl.dot(held, seen, input_precision=HOW)
    if BIAS:
        total += tl.load(bias + lane * O + o, mask=o < O, other=0.0)[:, None]
    out = z + lane * B * (O * P * Q) + b.to(tl.int64) * (O * P * Q) + (p * Q + q)
    tl.store(out[None, :] + o[:, None] * (P * Q), total, mask=(o < O)[:, None] & (n < N)[None, :])


@triton.jit
def weights(x, g, out, N, LANES, SPAN, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr,
            P: tl.constexpr, Q: tl.constexpr, S: tl.constexpr, TAPS: tl.constexpr, STEP_H: tl.constexpr,
            STEP_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
            HOW: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """out (part, lane, tap, O, C): the weight's gradient over the part's SPAN pixels; g (lane, B, O, P, Q)."""
    part, lane = tl.program_id(2) // LANES, (tl.program_id(2) % LANES).to(tl.int64)
    TILES: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    tap = tl.program_id(1)
    o = tl.program_id(0) // TILES * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(0) % TILES * BLOCK_C + tl.arange(0, BLOCK_C)
    r, s = tap // S, tap % S
    B = N // (P * Q)
    inputs, grads = x + lane * B * (C * H * W), g + lane * B * (O * P * Q)
    total = tl.zeros((BLOCK_O, BLOCK_C), tl.float32)
    for begin in range(part * SPAN, tl.minimum(part * SPAN + SPAN, N), BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        b, p, q = (n // (P * Q)).to(tl.int64), n // Q % P, n % Q
        h, w = p * STEP_H - PAD_H + r * DIL_H, q * STEP_W - PAD_W + s * DIL_W
        real = n < tl.minimum(part * SPAN + SPAN, N)
        inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & real
        pushed = tl.load(grads + (b * (O * P * Q) + p * Q + q)[None, :] + o[:, None] * (P * Q),
                         mask=(o < O)[:, None] & real[None, :], other=0.0)  # fmt: skip
        seen = tl.load(inputs + (b * (C * H * W) + h * W + w)[:, None] + c[None, :] * (H * W),
                       mask=inside[:, None] & (c < C)[None, :], other=0.0)  # fmt: skip
        if HOW == "bf16":
            total += tl.dot(pushed.to(tl.bfloat16), seen.to(tl.bfloat16))
        else:
            total += tl.dot(pushed, seen, input_precision=HOW)
    at = out + ((part * LANES + lane) * TAPS + tap) * (O * C)
    tl.store(at + o[:, None] * C + c[None, :], total, mask=(o < O)[:, None] & (c < C)[None, :])
