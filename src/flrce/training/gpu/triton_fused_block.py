# mypy: ignore-errors
"""Triton kernels for conv-BatchNorm-ReLU-pool of few channels; the lane is a grid axis, every sum
has a fixed order.

Shapes are compile-time constants: C, H, W of the input with its border of zeros, O, P, Q (height,
width) of the convolution's output, R, S of its kernel, U of the pooling window. z is the
convolution's output (lane, B, O, P, Q); a pixel is one (sample, p, q), numbered sample first, so
that the real samples of a padded batch are the first pixels.
"""

import triton
import triton.language as tl


@triton.jit
def gather_samples(
    x,
    index,
    out,
    scale,
    shift,
    B,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out (lane, B, C, H, W) = the samples in `index`, scaled, with a border of EDGE zeros (counted
    in H and W).
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, c, h, w = e // (C * H * W), e // (H * W) % C, e // W % H - EDGE, e % W - EDGE
    lane = tl.program_id(1).to(tl.int64)
    sample = tl.load(index + lane * B + b, mask=b < B, other=0).to(tl.int64)
    inside = (b < B) & (h >= 0) & (h < H - 2 * EDGE) & (w >= 0) & (w < W - 2 * EDGE)
    at = (sample * C + c) * ((H - 2 * EDGE) * (W - 2 * EDGE)) + h * (W - 2 * EDGE) + w
    v = tl.load(x + at, mask=inside, other=0).to(tl.float32) * scale + shift
    tl.store(out + lane * B * (C * H * W) + e, tl.where(inside, v, 0.0), mask=b < B)


@triton.jit
def convolve(
    x,
    weight,
    bias,
    z,
    moments,
    count,
    B,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z = weight * x + bias, and each tile's mean and sum of squared distances from it: moments
    (lane, 2, O, tiles).
    """
    K: tl.constexpr = C * R * S
    tile, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    left = tl.load(count + lane) * (P * Q) - tile * BLOCK  # real pixels from here on
    if left > 0:
        o = tl.arange(0, BLOCK_O)
        pixel = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        real = tl.arange(0, BLOCK)[None, :] < left
        b, p, q = tl.minimum(pixel // (P * Q), B - 1), pixel // Q % P, pixel % Q
        inputs = x + lane * B * (C * H * W) + (b * (C * H * W) + p * (STEP * W) + q * STEP)
        taps = weight + lane * (O * K) + o * K
        z_tile = tl.zeros((BLOCK_O, BLOCK), tl.float32)
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                for c in range(C):
                    tap = tl.load(taps + (c * (R * S) + r * S + s), mask=o < O, other=0)
                    z_tile += tap[:, None] * tl.load(inputs + (c * (H * W) + r * W + s))
        if BIAS:
            z_tile += tl.load(bias + lane * O + o, mask=o < O, other=0)[:, None]
        out = z + lane * B * (O * P * Q) + (b * (O * P * Q) + p * Q + q) + o[:, None] * (P * Q)
        tl.store(out, z_tile, mask=(o < O)[:, None] & real)
        mean = tl.sum(tl.where(real, z_tile, 0.0), 1) / tl.minimum(left, BLOCK)
        away = tl.where(real, z_tile - mean[:, None], 0.0)
        note = moments + (lane * (2 * O) + o) * tl.num_programs(0) + tile
        tl.store(note, mean, mask=o < O)
        tl.store(note + O * tl.num_programs(0), tl.sum(away * away, 1), mask=o < O)


@triton.jit
def merge_moments(
    moments,
    count,
    gamma,
    beta,
    running_mean,
    running_var,
    facts,
    momentum,
    eps,
    TILES,
    O: tl.constexpr,
    AREA: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chan's merge of tiles; facts (lane, 4, O): mean, 1/std, slope, offset. Updates running
    statistics.
    """
    o, lane = tl.program_id(0), tl.program_id(1)
    n = tl.load(count + lane) * AREA
    tile = tl.arange(0, BLOCK)
    share = tl.minimum(tl.maximum(n - tile * TILE, 0), TILE).to(tl.float32)
    at = moments + (lane * 2 * O + o) * TILES + tile
    means = tl.load(at, mask=share > 0, other=0)
    total = tl.maximum(n, 1).to(tl.float32)
    mean = tl.sum(means * share, 0) / total
    away = tl.where(share > 0, means - mean, 0.0)
    var = tl.sum(tl.load(at + O * TILES, mask=share > 0, other=0) + share * away * away, 0) / total
    here = lane * O + o
    inverse = 1.0 / tl.sqrt(var + eps)
    slope = tl.load(gamma + here) * inverse
    facts += lane * 4 * O + o
    tl.store(facts, mean)
    tl.store(facts + O, inverse)
    tl.store(facts + 2 * O, slope)
    tl.store(facts + 3 * O, tl.load(beta + here) - mean * slope)
    if n > 0:
        before = tl.load(running_mean + here)
        tl.store(running_mean + here, before + momentum * (mean - before))
        before = tl.load(running_var + here)
        tl.store(
            running_var + here,
            before + momentum * (var * total / tl.maximum(total - 1, 1) - before),
        )


@triton.jit
def normalise_and_pool(
    z,
    facts,
    count,
    out,
    peak,
    code,
    B,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    U: tl.constexpr,
    EDGE: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = max over windows of relu(slope z + offset), in a border of EDGE zeros and 0 for padding
    samples.

    KEEP: the winner's z, and its place u * U + v in the window: the first maximum, as torch breaks
    ties, or U * U where ReLU lets nothing through.
    """
    PP: tl.constexpr = P // U + 2 * EDGE
    QQ: tl.constexpr = Q // U + 2 * EDGE
    lane = tl.program_id(1).to(tl.int64)
    samples = tl.load(count + lane)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, o, p, q = e // (O * PP * QQ), e // (PP * QQ) % O, e // QQ % PP - EDGE, e % QQ - EDGE
    inside = (b < samples) & (p >= 0) & (p < P // U) & (q >= 0) & (q < Q // U)
    slope = tl.load(facts + lane * 4 * O + 2 * O + o)
    offset = tl.load(facts + lane * 4 * O + 3 * O + o)
    at = z + lane * B * (O * P * Q) + ((b * O + o) * (P * Q) + p * (U * Q) + q * U)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    winner = tl.zeros((BLOCK,), tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    for u in tl.static_range(U):
        for v in tl.static_range(U):
            value = tl.load(at + (u * Q + v), mask=inside, other=0)
            y = value * slope + offset
            better = (y > best) | (y != y)  # a NaN must not be lost
            best = tl.where(better, y, best)
            winner = tl.where(better, value, winner)
            which = tl.where(better, u * U + v, which)
    dead = (best <= 0) | (inside == 0)
    to = lane * B * (O * PP * QQ) + e
    tl.store(out + to, tl.where(dead, 0.0, best), mask=b < B)
    if KEEP:
        tl.store(peak + to, winner, mask=b < B)
        tl.store(code + to, tl.where(dead, U * U, which).to(tl.uint8), mask=b < B)


@triton.jit
def reduce_norm_gradients(
    g,
    peak,
    code,
    facts,
    count,
    sums,
    B,
    O: tl.constexpr,
    AREA: tl.constexpr,
    DEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sums (2, lane, O) of dy and of dy * xhat (the gradients of beta and gamma), over pooled
    positions only.
    """
    o, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = tl.load(count + lane) * AREA
    mean = tl.load(facts + lane * 4 * O + o)
    inverse = tl.load(facts + lane * 4 * O + O + o)
    plain = tl.zeros((BLOCK,), tl.float32)
    scaled = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, n, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        at = lane * B * (O * AREA) + (e // AREA * O + o) * AREA + e % AREA
        alive = tl.load(code + at, mask=e < n, other=DEAD) < DEAD
        # borders of g were never written
        dy = tl.where(alive, tl.load(g + at, mask=e < n, other=0), 0.0)
        plain += dy
        scaled += dy * (tl.load(peak + at, mask=e < n, other=0) - mean) * inverse
    tl.store(sums + lane * O + o, tl.sum(plain, 0))
    tl.store(sums + (tl.num_programs(1) + lane) * O + o, tl.sum(scaled, 0))


@triton.jit
def backpropagate_pool(
    z,
    g,
    code,
    facts,
    sums,
    count,
    B,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    U: tl.constexpr,
    EDGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z becomes dz, back through pooling, ReLU and BatchNorm."""
    PP: tl.constexpr = P // U + 2 * EDGE
    QQ: tl.constexpr = Q // U + 2 * EDGE
    lane = tl.program_id(1).to(tl.int64)
    samples = tl.load(count + lane)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, o, p, q = e // (O * P * Q), e // (P * Q) % O, e // Q % P, e % Q
    real = b < samples
    at = lane * B * (O * PP * QQ) + ((b * O + o) * (PP * QQ) + (p // U + EDGE) * QQ + q // U + EDGE)
    pooled = real & (p // U < P // U) & (q // U < Q // U)
    hit = tl.load(code + at, mask=pooled, other=U * U) == p % U * U + q % U
    dy = tl.load(g + at, mask=hit, other=0)
    fact, total = facts + lane * 4 * O + o, sums + lane * O + o
    z += lane * B * (O * P * Q)
    xhat = (tl.load(z + e, mask=real, other=0) - tl.load(fact)) * tl.load(fact + O)
    dz = tl.load(fact + 2 * O) * (
        dy - (tl.load(total) + xhat * tl.load(total + tl.num_programs(1) * O)) / (samples * (P * Q))
    )
    tl.store(z + e, dz, mask=real)


@triton.jit
def grad_weight(
    x,
    dz,
    count,
    out,
    B,
    CHUNKS,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out (lane, chunk, O, C*R*S): dz x^T over every CHUNKS-th tile of pixels.

    tf32x3 makes each float32 product of three TF32 ones, exact to about 2^-21: as close to float64
    as plain float32.
    """
    K: tl.constexpr = C * R * S
    chunk, lane = tl.program_id(0) % CHUNKS, tl.program_id(1).to(tl.int64)
    samples = tl.load(count + lane)
    o = tl.arange(0, BLOCK_O)[:, None]
    k = tl.program_id(0) // CHUNKS * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    taps = tl.where(k < K, k // (R * S) * (H * W) + k // S % R * W + k % S, 0)
    x += lane * B * (C * H * W)
    dz += lane * B * (O * P * Q)
    acc = tl.zeros((BLOCK_O, BLOCK_K), tl.float32)
    for begin in range(chunk * BLOCK, samples * (P * Q), CHUNKS * BLOCK):
        pixel = begin + tl.arange(0, BLOCK)[None, :]
        b, p, q = tl.minimum(pixel // (P * Q), B - 1), pixel // Q % P, pixel % Q
        v = tl.load(x + ((b * (C * H * W) + p * (STEP * W) + q * STEP) + taps))
        ok = (o < O) & (pixel < samples * (P * Q))
        d = tl.load(dz + (b * (O * P * Q) + o * (P * Q) + (p * Q + q)), mask=ok, other=0)
        acc = tl.dot(d, tl.trans(v), acc, input_precision="tf32x3")
    k = tl.program_id(0) // CHUNKS * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    tl.store(out + (lane * CHUNKS + chunk) * (O * K) + o * K + k, acc, mask=(o < O) & (k < K))


@triton.jit
def grad_input(
    dz,
    weight,
    dx,
    count,
    B,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    O: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    STEP: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """dx = the transposed convolution of dz, 0 for padding samples; x's border of PAD (counted in
    H, W) is left out.
    """
    HH: tl.constexpr = H - 2 * PAD
    WW: tl.constexpr = W - 2 * PAD
    lane = tl.program_id(1).to(tl.int64)
    samples = tl.load(count + lane)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    b, h, w = pixel // (HH * WW), pixel // WW % HH + PAD, pixel % WW + PAD
    c = tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    if tl.program_id(0) * BLOCK < samples * (HH * WW):
        taps = weight + lane * (O * C * R * S) + c * (R * S)
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                p, q = (h - r) // STEP, (w - s) // STEP
                ok = (
                    (b < samples)
                    & (h >= r)
                    & (p < P)
                    & (w >= s)
                    & (q < Q)
                    & (p * STEP == h - r)
                    & (q * STEP == w - s)
                )
                at = dz + lane * B * (O * P * Q) + (b * (O * P * Q) + p * Q + q)
                for o in tl.range(0, O, loop_unroll_factor=UNROLL):
                    tap = tl.load(taps + (o * (C * R * S) + r * S + s), mask=c < C, other=0)
                    acc += tap[:, None] * tl.load(at + o * (P * Q), mask=ok, other=0)
    to = dx + lane * B * (C * H * W) + (b * (C * H * W) + h * W + w) + c[:, None] * (H * W)
    tl.store(to, acc, mask=(c < C)[:, None] & (b < B))
