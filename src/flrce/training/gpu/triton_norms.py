# mypy: ignore-errors
"""Normalisation of many lanes with channels last, in Triton: sums in parts of fixed order, then a
pass to apply them.

A unit is what has statistics of its own: a sample (GroupNorm) or a lane (BatchNorm). It is a matrix
of FULL pixels x C channels, of which the first `count` x AREA pixels are real; a group is WIDTH
neighbouring channels, padded to SLOTS, a power of two. A program has GROUPS of them and one part of
the pixels, SPAN of them.
"""

import triton
import triton.language as tl


@triton.jit
def locate_channels(
    nth, SLOTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, C: tl.constexpr
):
    """(channel, whether there is such a one) of each of the GROUPS x SLOTS places of a unit's nth
    program.
    """
    place = tl.arange(0, GROUPS * SLOTS)
    first = nth * (GROUPS * WIDTH)
    if WIDTH == SLOTS:  # said so that Triton sees how many channels are neighbours
        return first + place, first + place < C
    channel = first + place // SLOTS * WIDTH + place % SLOTS
    return channel, (place % SLOTS < WIDTH) & (channel < C)


@triton.jit
def sum_groups(v, SLOTS: tl.constexpr, GROUPS: tl.constexpr):
    """The sum over each group, at each of its places."""
    total = tl.sum(tl.reshape(v, (GROUPS, SLOTS)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (GROUPS, SLOTS)), (GROUPS * SLOTS,))


@triton.jit
def compute_moments(
    x,
    count,
    middle,
    spread,
    FULL,
    AREA,
    SPAN,
    PARTS,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """middle, spread (units, PARTS, C): mean and sum of squared distances from it, of the part's
    real pixels.
    """
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel, there = locate_channels(tl.program_id(1), SLOTS, WIDTH, GROUPS, C)
    real = tl.load(count + unit) * AREA if BATCH else FULL
    begin, end = part * SPAN, tl.minimum(part * SPAN + SPAN, real)
    mean = tl.zeros((GROUPS * SLOTS,), tl.float32)
    away = tl.zeros((GROUPS * SLOTS,), tl.float32)
    for at in range(begin, end, PIXELS):
        n = at + tl.arange(0, PIXELS)
        mask = (n < end)[:, None] & there[None, :]
        v = tl.load(x + (unit * FULL + n)[:, None] * C + channel[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        m = tl.minimum(PIXELS, end - at).to(tl.float32)
        before = (at - begin).to(tl.float32)
        here = tl.sum(v, 0) / m
        off = tl.where(mask, v - here[None, :], 0.0)
        delta = here - mean
        away += tl.sum(off * off, 0) + delta * delta * (before * m / (before + m))
        mean += delta * (m / (before + m))
    at = (unit * PARTS + part) * C + channel
    tl.store(middle + at, mean, mask=there)
    tl.store(spread + at, away, mask=there)


@triton.jit
def normalise(
    x,
    count,
    middle,
    spread,
    weight,
    bias,
    y,
    mean,
    scale,
    FULL,
    AREA,
    SPAN,
    PARTS,
    UNITS,
    eps,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
    BATCH: tl.constexpr,
    AFFINE: tl.constexpr,
):
    """y = (x - mean) scale weight + bias; mean, scale (units, C): of each channel's group. UNITS of
    a lane.
    """
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel, there = locate_channels(tl.program_id(1), SLOTS, WIDTH, GROUPS, C)
    real = tl.load(count + unit) * AREA if BATCH else FULL
    mid = tl.zeros((GROUPS * SLOTS,), tl.float32)
    away = tl.zeros((GROUPS * SLOTS,), tl.float32)
    before = 0.0
    for i in range(PARTS):
        at = (unit * PARTS + i) * C + channel
        m = tl.maximum(tl.minimum(SPAN, real - i * SPAN), 0).to(tl.float32)
        delta = tl.load(middle + at, mask=there, other=0.0) - mid
        whole = tl.maximum(before + m, 1.0)
        away += tl.load(spread + at, mask=there, other=0.0) + delta * delta * (before * m / whole)
        mid += delta * (m / whole)
        before += m
    center = sum_groups(tl.where(there, mid, 0.0), SLOTS, GROUPS) / WIDTH
    apart = tl.where(there, mid - center, 0.0)
    total = sum_groups(tl.where(there, away + apart * apart * before, 0.0), SLOTS, GROUPS)
    inverse = 1.0 / tl.sqrt(total / tl.maximum(before * WIDTH, 1.0) + eps)
    if part == 0:
        tl.store(mean + unit * C + channel, center, mask=there)
        tl.store(scale + unit * C + channel, inverse, mask=there)
    a, b = inverse, -center * inverse
    if AFFINE:
        own = unit // UNITS * C + channel
        w = tl.load(weight + own, mask=there, other=0.0)
        a = a * w
        b = b * w + tl.load(bias + own, mask=there, other=0.0)
    for at in range(part * SPAN, tl.minimum(part * SPAN + SPAN, FULL), PIXELS):
        n = at + tl.arange(0, PIXELS)
        mask = (n < tl.minimum(part * SPAN + SPAN, FULL))[:, None] & there[None, :]
        here = (unit * FULL + n)[:, None] * C + channel[None, :]
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
        tl.store(y + here, tl.where((n < real)[:, None], v, 0.0), mask=mask)


@triton.jit
def sum_gradients(
    x,
    g,
    count,
    mean,
    scale,
    by_bias,
    by_weight,
    FULL,
    AREA,
    SPAN,
    PARTS,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """by_bias, by_weight (units, PARTS, C): sums of g, and of g times the normalised x, over the
    part's real pixels.
    """
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel, there = locate_channels(tl.program_id(1), SLOTS, WIDTH, GROUPS, C)
    real = tl.load(count + unit) * AREA if BATCH else FULL
    center = tl.load(mean + unit * C + channel, mask=there, other=0.0)
    inverse = tl.load(scale + unit * C + channel, mask=there, other=0.0)
    plain = tl.zeros((GROUPS * SLOTS,), tl.float32)
    scaled = tl.zeros((GROUPS * SLOTS,), tl.float32)
    end = tl.minimum(part * SPAN + SPAN, real)
    for at in range(part * SPAN, end, PIXELS):
        n = at + tl.arange(0, PIXELS)
        mask = (n < end)[:, None] & there[None, :]
        here = (unit * FULL + n)[:, None] * C + channel[None, :]
        push = tl.load(g + here, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        hat = (v - center[None, :]) * inverse[None, :]
        plain += tl.sum(push, 0)
        scaled += tl.sum(push * hat, 0)
    at = (unit * PARTS + part) * C + channel
    tl.store(by_bias + at, plain, mask=there)
    tl.store(by_weight + at, scaled, mask=there)


@triton.jit
def backward(
    x,
    g,
    count,
    mean,
    scale,
    weight,
    by_bias,
    by_weight,
    gx,
    bias_sum,
    weight_sum,
    FULL,
    AREA,
    SPAN,
    PARTS,
    UNITS,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PIXELS: tl.constexpr,
    BATCH: tl.constexpr,
    AFFINE: tl.constexpr,
):
    """gx, and the sums of all parts (units, C)."""
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    channel, there = locate_channels(tl.program_id(1), SLOTS, WIDTH, GROUPS, C)
    real = tl.load(count + unit) * AREA if BATCH else FULL
    center = tl.load(mean + unit * C + channel, mask=there, other=0.0)
    inverse = tl.load(scale + unit * C + channel, mask=there, other=0.0)
    plain = tl.zeros((GROUPS * SLOTS,), tl.float32)
    scaled = tl.zeros((GROUPS * SLOTS,), tl.float32)
    for i in range(PARTS):
        at = (unit * PARTS + i) * C + channel
        plain += tl.load(by_bias + at, mask=there, other=0.0)
        scaled += tl.load(by_weight + at, mask=there, other=0.0)
    if part == 0:
        tl.store(bias_sum + unit * C + channel, plain, mask=there)
        tl.store(weight_sum + unit * C + channel, scaled, mask=there)
    w = tl.where(there, 1.0, 0.0)
    if AFFINE:
        w = tl.load(weight + unit // UNITS * C + channel, mask=there, other=0.0)
    size = tl.maximum(real * WIDTH, 1).to(tl.float32)
    first = sum_groups(tl.where(there, plain * w, 0.0), SLOTS, GROUPS) / size
    second = sum_groups(tl.where(there, scaled * w, 0.0), SLOTS, GROUPS) / size
    end = tl.minimum(part * SPAN + SPAN, FULL)
    for at in range(part * SPAN, end, PIXELS):
        n = at + tl.arange(0, PIXELS)
        mask = (n < end)[:, None] & there[None, :]
        here = (unit * FULL + n)[:, None] * C + channel[None, :]
        push = tl.load(g + here, mask=mask, other=0.0).to(tl.float32) * w[None, :]
        v = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        hat = (v - center[None, :]) * inverse[None, :]
        moved = (push - first[None, :] - hat * second[None, :]) * inverse[None, :]
        tl.store(gx + here, tl.where((n < real)[:, None], moved, 0.0), mask=mask)
