# mypy: ignore-errors
"""Triton kernels for conv-BatchNorm-ReLU-pool of few channels; the lane is a grid axis, every sum has a fixed order.

Shapes are compile-time constants: C, H, W of the input, O, P, Q (height, width) of the convolution's output,
R, S of its kernel, U of the pooling window. z is the convolution's output (lane, B, O, P, Q); a pixel is one
(sample, p, q), numbered sample first, so that the real samples of a padded batch are the first pixels.
"""

import triton
import triton.language as tl


@triton.jit
def _origins(index, lane, b, real, B, SIZE: tl.constexpr, GATHER: tl.constexpr):
    """Where each pixel's sample begins in the input: in its lane's batch, or among all samples through `index`."""
    if GATHER:
        return tl.load(index + lane * B + b, mask=real, other=0).to(tl.int64) * SIZE
    else:
        return (lane * B + b).to(tl.int64) * SIZE


@triton.jit
def _columns(x, origin, p, q, k, real, scale, shift, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
             S: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """im2col on the fly: the (len(k), pixels) inputs under tap k of each pixel, 0 outside."""
    c = k // (R * S)
    h = (p * STEP - PAD)[None, :] + (k // S % R)[:, None]
    w = (q * STEP - PAD)[None, :] + (k % S)[:, None]
    inside = real[None, :] & (c < C)[:, None] & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    v = tl.load(x + origin[None, :] + (c * (H * W))[:, None] + h * W + w, mask=inside, other=0).to(tl.float32)
    if GATHER:
        v = tl.where(inside, v * scale + shift, 0.0)
    return v


@triton.jit
def convolve(x, index, weight, bias, z, moments, count, scale, shift, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
             O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr,
             PAD: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr, BLOCK_O: tl.constexpr,
             BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """z = weight * x + bias, and each tile's mean and sum of squared distances from it: moments (lane, 2, O, tiles)."""
    K: tl.constexpr = C * R * S
    tile, lane = tl.program_id(0), tl.program_id(1)
    left = tl.load(count + lane) * (P * Q) - tile * BLOCK  # real pixels from here on
    o = tl.arange(0, BLOCK_O)
    note = moments + lane * (2 * O) * tl.num_programs(0) + o * tl.num_programs(0) + tile
    if left > 0:
        pixel = tile * BLOCK + tl.arange(0, BLOCK)
        real = tl.arange(0, BLOCK) < left
        b, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
        origin = _origins(index, lane, b, real, B, C * H * W, GATHER)
        z_tile = tl.zeros((BLOCK_O, BLOCK), tl.float32)
        if EXACT:
            for r in tl.static_range(R):
                for s in tl.static_range(S):
                    h, w = p * STEP + (r - PAD), q * STEP + (s - PAD)
                    inside = real & (h >= 0) & (h < H) & (w >= 0) & (w < W)
                    for c in range(C):
                        v = tl.load(x + origin + (c * (H * W) + h * W + w), mask=inside, other=0).to(tl.float32)
                        if GATHER:
                            v = tl.where(inside, v * scale + shift, 0.0)
                        tap = weight + lane * (O * K) + c * (R * S) + (r * S + s) + o * K
                        z_tile += tl.load(tap, mask=o < O, other=0)[:, None] * v[None, :]
        else:
            for at in range(0, K, BLOCK_K):
                k = at + tl.arange(0, BLOCK_K)
                v = _columns(x, origin, p, q, k, real, scale, shift, C, H, W, R, S, STEP, PAD, GATHER)
                taps = weight + lane * (O * K) + o[:, None] * K + k[None, :]
                taps = tl.load(taps, mask=(o < O)[:, None] & (k < K)[None, :], other=0)
                z_tile = tl.dot(taps, v, z_tile, input_precision="tf32x3")
        if BIAS:
            z_tile += tl.load(bias + lane * O + o, mask=o < O, other=0)[:, None]
        out = z + (lane * B + b).to(tl.int64)[None, :] * (O * P * Q) + (o * (P * Q))[:, None] + (p * Q + q)[None, :]
        tl.store(out, z_tile, mask=(o < O)[:, None] & real[None, :])
        mean = tl.sum(tl.where(real[None, :], z_tile, 0.0), 1) / tl.minimum(left, BLOCK)
        away = tl.where(real[None, :], z_tile - mean[:, None], 0.0)
        tl.store(note, mean, mask=o < O)
        tl.store(note + O * tl.num_programs(0), tl.sum(away * away, 1), mask=o < O)


@triton.jit
def merge(moments, count, gamma, beta, running_mean, running_var, facts, momentum, eps, TILES, O: tl.constexpr,
          AREA: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Chan's merge of the tiles' moments; facts (lane, 4, O): mean, 1/std, slope, offset; running statistics in place."""
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
        tl.store(running_var + here, before + momentum * (var * total / tl.maximum(total - 1, 1) - before))


@triton.jit
def pool(z, facts, count, out, peak, code, B, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, U: tl.constexpr,
         KEEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out = max over windows of relu(slope z + offset), 0 for padding samples; KEEP: the winner's z, and which it was.

    code is u * U + v of the first maximum, as torch breaks ties, or U * U where ReLU lets nothing through.
    """
    PP: tl.constexpr = P // U
    QQ: tl.constexpr = Q // U
    lane = tl.program_id(1)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, o = e // (O * PP * QQ), e // (PP * QQ) % O
    inside, real = e < B * (O * PP * QQ), b < tl.load(count + lane)
    slope = tl.load(facts + lane * 4 * O + 2 * O + o)
    offset = tl.load(facts + lane * 4 * O + 3 * O + o)
    at = z + ((lane * B + b).to(tl.int64) * O + o) * (P * Q) + (e // QQ % PP) * (U * Q) + e % QQ * U
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    winner = tl.zeros((BLOCK,), tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    for u in tl.static_range(U):
        for v in tl.static_range(U):
            value = tl.load(at + u * Q + v, mask=inside & real, other=0)
            y = value * slope + offset
            better = (y > best) | (y != y)  # a NaN must not be lost
            best = tl.where(better, y, best)
            winner = tl.where(better, value, winner)
            which = tl.where(better, u * U + v, which)
    which = tl.where(best <= 0, U * U, which)
    best = tl.where((best <= 0) | (b >= tl.load(count + lane)), 0.0, best)
    to = (lane * B).to(tl.int64) * (O * PP * QQ) + e
    tl.store(out + to, best, mask=inside)
    if KEEP:
        tl.store(peak + to, winner, mask=inside)
        tl.store(code + to, which.to(tl.uint8), mask=inside)


@triton.jit
def reduce(g, peak, code, facts, count, sums, B, O: tl.constexpr, AREA: tl.constexpr, DEAD: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Per channel, sum of dy and of dy * xhat (the gradients of beta and gamma), over pooled positions only."""
    o, lane = tl.program_id(0), tl.program_id(1)
    n = tl.load(count + lane) * AREA
    mean = tl.load(facts + lane * 4 * O + o)
    inverse = tl.load(facts + lane * 4 * O + O + o)
    plain = tl.zeros((BLOCK,), tl.float32)
    scaled = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, n, BLOCK):
        e = begin + tl.arange(0, BLOCK)
        at = ((lane * B + e // AREA).to(tl.int64) * O + o) * AREA + e % AREA
        alive = (e < n) & (tl.load(code + at, mask=e < n, other=DEAD) < DEAD)
        dy = tl.load(g + at, mask=alive, other=0)
        plain += dy
        scaled += dy * (tl.load(peak + at, mask=alive, other=0) - mean) * inverse
    tl.store(sums + lane * 2 * O + o, tl.sum(plain, 0))
    tl.store(sums + lane * 2 * O + O + o, tl.sum(scaled, 0))


@triton.jit
def _slope(z, g, code, facts, sums, lane, b, o, p, q, ok, B, n, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
           U: tl.constexpr):  # fmt: skip
    """dz of BatchNorm-ReLU-pool at (b, o, p, q); n is the number of values behind each mean."""
    PP: tl.constexpr = P // U
    QQ: tl.constexpr = Q // U
    fact = facts + lane * 4 * O + o
    value = tl.load(z + ((lane * B + b).to(tl.int64) * O + o) * (P * Q) + p * Q + q, mask=ok, other=0)
    at = ((lane * B + b).to(tl.int64) * O + o) * (PP * QQ) + (p // U) * QQ + q // U
    pooled = ok & (p // U < PP) & (q // U < QQ)
    hit = tl.load(code + at, mask=pooled, other=U * U) == p % U * U + q % U
    dy = tl.load(g + at, mask=pooled & hit, other=0)
    xhat = (value - tl.load(fact, mask=o < O, other=0)) * tl.load(fact + O, mask=o < O, other=0)
    plain = tl.load(sums + lane * 2 * O + o, mask=o < O, other=0) / n
    scaled = tl.load(sums + lane * 2 * O + O + o, mask=o < O, other=0) / n
    return tl.where(ok, tl.load(fact + 2 * O, mask=o < O, other=0) * (dy - plain - xhat * scaled), 0.0)


@triton.jit
def spread(z, g, code, facts, sums, count, B, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, U: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """z becomes dz."""
    lane = tl.program_id(1)
    samples = tl.load(count + lane)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, o, p, q = e // (O * P * Q), e // (P * Q) % O, e // Q % P, e % Q
    dz = _slope(z, g, code, facts, sums, lane, b, o, p, q, b < samples, B, samples * (P * Q), O, P, Q, U)
    tl.store(z + (lane * B).to(tl.int64) * (O * P * Q) + e, dz, mask=b < samples)


@triton.jit
def grad_weight(x, index, z, g, code, facts, sums, count, scale, shift, out, B, CHUNKS, C: tl.constexpr, H: tl.constexpr,
                W: tl.constexpr, O: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
                STEP: tl.constexpr, PAD: tl.constexpr, U: tl.constexpr, GATHER: tl.constexpr, SPREAD: tl.constexpr,
                EXACT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out (lane, chunk, O, C*R*S): dz x^T over one chunk of pixels; SPREAD: z holds dz already."""
    K: tl.constexpr = C * R * S
    chunk, lane = tl.program_id(0) % CHUNKS, tl.program_id(1)
    samples = tl.load(count + lane)
    k = tl.program_id(0) // CHUNKS * BLOCK_K + tl.arange(0, BLOCK_K)
    o = tl.arange(0, BLOCK_O)
    if EXACT:  # each thread sums its own pixels
        acc = tl.zeros((BLOCK_O, BLOCK_K, BLOCK), tl.float32)
    else:
        acc = tl.zeros((BLOCK_O, BLOCK_K), tl.float32)
    for begin in range(chunk * BLOCK, samples * (P * Q), CHUNKS * BLOCK):
        pixel = begin + tl.arange(0, BLOCK)
        b, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
        real = b < samples
        origin = _origins(index, lane, b, real, B, C * H * W, GATHER)
        v = _columns(x, origin, p, q, k, real, scale, shift, C, H, W, R, S, STEP, PAD, GATHER)
        ok = (o < O)[:, None] & real[None, :]
        if SPREAD:
            at = z + (lane * B + b).to(tl.int64)[None, :] * (O * P * Q) + (o * (P * Q))[:, None] + (p * Q + q)[None, :]
            dz = tl.load(at, mask=ok, other=0)
        else:
            dz = _slope(z, g, code, facts, sums, lane, b[None, :], o[:, None], p[None, :], q[None, :], ok, B,
                        samples * (P * Q), O, P, Q, U)  # fmt: skip
        if EXACT:
            acc += dz[:, None, :] * v[None, :, :]
        else:
            acc = tl.dot(dz, tl.trans(v), acc, input_precision="tf32x3")
    if EXACT:
        acc = tl.sum(acc, 2)
    to = out + (lane * CHUNKS + chunk) * (O * K) + o[:, None] * K + k[None, :]
    tl.store(to, acc, mask=(o < O)[:, None] & (k < K)[None, :])


@triton.jit
def grad_input(dz, weight, dx, count, B, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, P: tl.constexpr,
               Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, EXACT: tl.constexpr,
               BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """dx = the transposed convolution of dz; 0 for padding samples."""
    K: tl.constexpr = O * R * S
    lane = tl.program_id(1)
    samples = tl.load(count + lane)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, h, w = pixel // (H * W), pixel // W % H, pixel % W
    c = tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_C, BLOCK), tl.float32)
    if tl.program_id(0) * BLOCK < samples * (H * W):
        origin = (lane * B + b).to(tl.int64) * (O * P * Q)
        if EXACT:
            for r in tl.static_range(R):
                for s in tl.static_range(S):
                    up, across = h + (PAD - r), w + (PAD - s)
                    p, q = up // STEP, across // STEP
                    ok = (b < samples) & (up >= 0) & (p < P) & (across >= 0) & (q < Q)
                    ok &= (p * STEP == up) & (q * STEP == across)
                    for o in range(O):
                        v = tl.load(dz + origin + (o * (P * Q) + p * Q + q), mask=ok, other=0)
                        tap = weight + (lane * O + o) * (C * R * S) + (r * S + s) + c * (R * S)
                        acc += tl.load(tap, mask=c < C, other=0)[:, None] * v[None, :]
        else:
            for at in range(0, K, BLOCK_K):
                k = at + tl.arange(0, BLOCK_K)
                o, r, s = k // (R * S), k // S % R, k % S
                up, across = (h + PAD)[None, :] - r[:, None], (w + PAD)[None, :] - s[:, None]
                p, q = up // STEP, across // STEP
                ok = (b < samples)[None, :] & (o < O)[:, None] & (up >= 0) & (p < P) & (across >= 0) & (q < Q)
                ok &= (p * STEP == up) & (q * STEP == across)
                v = tl.load(dz + origin[None, :] + (o * (P * Q))[:, None] + p * Q + q, mask=ok, other=0)
                taps = (
                    weight + lane * (O * C * R * S) + ((o * C)[None, :] + c[:, None]) * (R * S) + (k % (R * S))[None, :]
                )
                taps = tl.load(taps, mask=(c < C)[:, None] & (k < K)[None, :], other=0)
                acc = tl.dot(taps, v, acc, input_precision="tf32x3")
    to = dx + (lane * B + b).to(tl.int64)[None, :] * (C * H * W) + (c * (H * W))[:, None] + (h * W + w)[None, :]
    tl.store(to, acc, mask=(c < C)[:, None] & (b < B)[None, :])
