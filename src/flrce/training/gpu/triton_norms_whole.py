# mypy: ignore-errors
"""GroupNorm of many lanes with channels last, in Triton, in one pass: a program holds all that its
groups are made of.

Units, groups and slots as in `triton_norms_last`. A program has GROUPS whole groups of one sample:
FULL pixels, padded to PIXELS, a power of two. It reads each value once. A sample's programs are
neighbours, so that the lines of memory that they share are read at about the same time.
"""

import triton
import triton.language as tl

from flrce.training.gpu.triton_norms_last import affine_coefficients, locate_channels, sum_groups


@triton.jit
def locate_values(
    FULL,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
):
    """A program's unit and channels, and which of these there are; where its values lie in a unit,
    and which there are.

    The latter two (PIXELS, GROUPS x SLOTS). Places within a unit are int32, which takes fewer
    registers.
    """
    programs: tl.constexpr = (C + GROUPS * WIDTH - 1) // (GROUPS * WIDTH)  # of a unit
    unit = (tl.program_id(0) // programs).to(tl.int64)
    channel, there = locate_channels(tl.program_id(0) % programs, SLOTS, WIDTH, GROUPS, C)
    n = tl.arange(0, PIXELS)
    return (
        unit,
        channel,
        there,
        n[:, None] * C + channel[None, :],
        (n < FULL)[:, None] & there[None, :],
    )


@triton.jit
def forward(
    x,
    weight,
    bias,
    y,
    mean,
    scale,
    FULL,
    UNITS,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
):
    """y = (x - mean) scale weight + bias; mean, scale (units, C): of each channel's group. UNITS of
    a lane.

    RELU: what is negative becomes 0.
    """
    unit, channel, there, here, mask = locate_values(FULL, C, WIDTH, SLOTS, GROUPS, PIXELS)
    start = unit * FULL * C
    v = tl.load(x + start + here, mask=mask, other=0.0).to(tl.float32)
    size = FULL * WIDTH
    center = sum_groups(tl.sum(v, 0), SLOTS, GROUPS) / size
    off = tl.where(mask, v - center[None, :], 0.0)
    inverse = 1.0 / tl.sqrt(sum_groups(tl.sum(off * off, 0), SLOTS, GROUPS) / size + eps)
    tl.store(mean + unit * C + channel, center, mask=there)
    tl.store(scale + unit * C + channel, inverse, mask=there)
    a, b = affine_coefficients(
        center, inverse, weight, bias, unit // UNITS * C + channel, there, AFFINE
    )
    v = v * a[None, :] + b[None, :]
    if RELU:
        v = tl.where(v < 0.0, 0.0, v)
    tl.store(y + start + here, v, mask=mask)


@triton.jit
def backward(
    x,
    g,
    mean,
    scale,
    weight,
    bias,
    gx,
    bias_sum,
    weight_sum,
    FULL,
    UNITS,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
):
    """gx; bias_sum, weight_sum (units, C): sums of g, and of g times the normalised x, over a
    unit's pixels.

    RELU: g counts where y was positive.
    """
    unit, channel, there, here, mask = locate_values(FULL, C, WIDTH, SLOTS, GROUPS, PIXELS)
    start = unit * FULL * C
    push = tl.load(g + start + here, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(x + start + here, mask=mask, other=0.0).to(tl.float32)
    center = tl.load(mean + unit * C + channel, mask=there, other=0.0)
    inverse = tl.load(scale + unit * C + channel, mask=there, other=0.0)
    if RELU:
        a, b = affine_coefficients(
            center, inverse, weight, bias, unit // UNITS * C + channel, there, AFFINE
        )
        push = tl.where(v * a[None, :] + b[None, :] <= 0.0, 0.0, push)
    hat = (v - center[None, :]) * inverse[None, :]
    plain, scaled = tl.sum(push, 0), tl.sum(push * hat, 0)
    tl.store(bias_sum + unit * C + channel, plain, mask=there)
    tl.store(weight_sum + unit * C + channel, scaled, mask=there)
    w = tl.where(there, 1.0, 0.0)
    if AFFINE:
        w = tl.load(weight + unit // UNITS * C + channel, mask=there, other=0.0)
    size = FULL * WIDTH
    first = sum_groups(plain * w, SLOTS, GROUPS) / size
    second = sum_groups(scaled * w, SLOTS, GROUPS) / size
    moved = (push * w[None, :] - first[None, :] - hat * second[None, :]) * inverse[None, :]
    tl.store(gx + start + here, moved, mask=mask)
