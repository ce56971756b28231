# mypy: ignore-errors
"""Normalisation of many lanes in Triton: statistics, scale and shift in one pass, their gradients
in another.

A row is one span of values that share statistics, laid out as PARTS stretches of WIDTH values,
STRIDE values apart: for GroupNorm one (sample, group) of one stretch, for BatchNorm one (lane,
channel) of one stretch a sample. A channel has AREA values in a stretch. Padded samples of a lane
do not count; sums have a fixed order.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x,
    weight,
    bias,
    y,
    mean,
    scale,
    count,
    eps,
    B,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    AREA: tl.constexpr,
    BATCH: tl.constexpr,
    AFFINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS a sample (GroupNorm) or a lane (BatchNorm: BATCH). mean, scale (rows,): the mean and 1 /
    std of each.
    """
    row = tl.program_id(0)
    lane = row // ROWS if BATCH else row // (ROWS * B)
    place = row % ROWS
    if BATCH:
        begin = lane.to(tl.int64) * B * STRIDE + place * WIDTH
        parts = tl.load(count + lane)
    else:
        begin = (row // ROWS).to(tl.int64) * STRIDE + place * WIDTH
        parts = 1
    n = parts * WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, n, BLOCK):
        e = at + tl.arange(0, BLOCK)
        total += tl.load(
            x + begin + (e // WIDTH).to(tl.int64) * STRIDE + e % WIDTH, mask=e < n, other=0.0
        ).to(tl.float32)
    size = tl.maximum(n, 1).to(tl.float32)
    middle = tl.sum(total, 0) / size
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, n, BLOCK):
        e = at + tl.arange(0, BLOCK)
        v = tl.load(
            x + begin + (e // WIDTH).to(tl.int64) * STRIDE + e % WIDTH, mask=e < n, other=0.0
        ).to(tl.float32)
        away = tl.where(e < n, v - middle, 0.0)
        total += away * away
    inverse = 1.0 / tl.sqrt(tl.sum(total, 0) / size + eps)
    tl.store(mean + row, middle)
    tl.store(scale + row, inverse)
    full = (B if BATCH else 1) * WIDTH
    for at in range(0, full, BLOCK):
        e = at + tl.arange(0, BLOCK)
        here = begin + (e // WIDTH).to(tl.int64) * STRIDE + e % WIDTH
        v = tl.load(x + here, mask=e < n, other=0.0).to(tl.float32)
        v = (v - middle) * inverse
        if AFFINE:
            c = lane * C + (place * WIDTH + e % WIDTH) // AREA
            v = v * tl.load(weight + c, mask=e < full, other=0.0) + tl.load(
                bias + c, mask=e < full, other=0.0
            )
        tl.store(y + here, tl.where(e < n, v, 0.0), mask=e < full)


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
    count,
    B,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    AREA: tl.constexpr,
    CHANNELS: tl.constexpr,
    BATCH: tl.constexpr,
    AFFINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gx, and the sums of g xhat and of g for each row's CHANNELS: by_weight, by_bias (rows,
    CHANNELS).
    """
    row = tl.program_id(0)
    lane = row // ROWS if BATCH else row // (ROWS * B)
    place = row % ROWS
    if BATCH:
        begin = lane.to(tl.int64) * B * STRIDE + place * WIDTH
        parts = tl.load(count + lane)
    else:
        begin = (row // ROWS).to(tl.int64) * STRIDE + place * WIDTH
        parts = 1
    middle, inverse = tl.load(mean + row), tl.load(scale + row)
    first, second = 0.0, 0.0
    for channel in range(CHANNELS):
        plain = tl.zeros((BLOCK,), tl.float32)
        scaled = tl.zeros((BLOCK,), tl.float32)
        m = parts * AREA
        for at in range(0, m, BLOCK):
            e = at + tl.arange(0, BLOCK)
            here = begin + (e // AREA).to(tl.int64) * STRIDE + channel * AREA + e % AREA
            push = tl.load(g + here, mask=e < m, other=0.0).to(tl.float32)
            hat = (tl.load(x + here, mask=e < m, other=0.0).to(tl.float32) - middle) * inverse
            plain += push
            scaled += push * hat
        a, b = tl.sum(plain, 0), tl.sum(scaled, 0)
        tl.store(by_bias + row * CHANNELS + channel, a)
        tl.store(by_weight + row * CHANNELS + channel, b)
        if AFFINE:
            w = tl.load(weight + lane * C + (place * WIDTH) // AREA + channel)
            first += a * w
            second += b * w
        else:
            first += a
            second += b
    n = parts * WIDTH
    size = tl.maximum(n, 1).to(tl.float32)
    full = (B if BATCH else 1) * WIDTH
    for at in range(0, full, BLOCK):
        e = at + tl.arange(0, BLOCK)
        here = begin + (e // WIDTH).to(tl.int64) * STRIDE + e % WIDTH
        push = tl.load(g + here, mask=e < n, other=0.0).to(tl.float32)
        if AFFINE:
            push = push * tl.load(
                weight + lane * C + (place * WIDTH + e % WIDTH) // AREA, mask=e < full, other=0.0
            )
        hat = (tl.load(x + here, mask=e < n, other=0.0).to(tl.float32) - middle) * inverse
        v = (push - (first + hat * second) / size) * inverse
        tl.store(gx + here, tl.where(e < n, v, 0.0), mask=e < full)
