/* BatchNorm, activation and pooling around a convolution or matrix product, per tile, and the loss.
 * y is what the product wrote, [C][H][W]; with pooling, `best` holds each window's winner. All integers are constants. */

/* Frozen or evaluating: running statistics. gamma, beta NULL: not affine. */
INLINE void norm_frozen(struct channel *c, int C, const float *gamma, const float *beta, const float *mean, const float *var, float eps) {
    for (int i = 0; i < C; i++) {
        c->a[i] = (gamma ? gamma[i] : 1) / sqrtf(var[i] + eps);
        c->b[i] = (beta ? beta[i] : 0) - mean[i] * c->a[i];
    }
}

/* Adds one tile's fused sums to the batch's, without the empty lanes. */
INLINE void norm_collect(struct channel *c, int C, ivec mask) {
    for (int i = 0; i < C; i++) {
        c->first[i] += total(keep(mask, c->sum[i]));
        c->second[i] += total(keep(mask, c->square[i]));
        c->sum[i] = c->square[i] = (vec){0};
    }
}

/* Mean into `mean`, biased variance into `second`, from sums around `start` (close to the mean: little cancels);
 * `dead` outputs per batch see padding only and equal `start`. */
INLINE void norm_moments(struct channel *c, int C, double count, double dead) {
    for (int i = 0; i < C; i++) {
        double start = c->start[i], mean = (c->first[i] + dead * start) / count;
        double var = (c->second[i] + dead * start * start) / count - mean * mean;
        c->mean[i] = mean;
        c->second[i] = var > 0 ? var : 0;
    }
}

/* The same by two passes over y, where the product did not sum. */
INLINE void norm_measure(struct channel *c, const struct batch *b, const vec *y, int C, int size) {
    double count = (double)b->size * size;
    for (int i = 0; i < C; i++) {
        double sum = 0, square = 0;
        for (long t = 0; t < b->tiles; t++) {
            vec s = {0};
            for (int p = 0; p < size; p++) s += y[(t * C + i) * size + p];
            sum += total(keep(filled(b, t), s));
        }
        c->mean[i] = sum / count;
        for (long t = 0; t < b->tiles; t++) {
            vec s = {0};
            for (int p = 0; p < size; p++) {
                vec d = y[(t * C + i) * size + p] - c->mean[i];
                s += d * d;
            }
            square += total(keep(filled(b, t), s));
        }
        c->second[i] = square / count;
    }
}

/* a, b of z = a y + b and torch's running statistics; `offset` is the true mean minus y's. */
INLINE void norm_apply(struct channel *c, int C, double count, const float *gamma, const float *beta, float *mean, float *var,
                       const float *offset, float eps, float momentum) {
    for (int i = 0; i < C; i++) {
        c->inverse[i] = 1 / sqrt(c->second[i] + eps);
        c->a[i] = (gamma ? gamma[i] : 1) * c->inverse[i];
        c->b[i] = (beta ? beta[i] : 0) - c->mean[i] * c->a[i];
        mean[i] += momentum * (c->mean[i] + (offset ? offset[i] : 0) - mean[i]);
        var[i] += momentum * ((float)(c->second[i] * (count / (count - 1))) - var[i]);
    }
}

/* The winner of a pooling window: largest a y + b, that is largest or smallest y, or the first where a = 0. */
INLINE vec winner(const vec *y, int W, int kh, int kw, int sign) {
    vec v = y[0];
#pragma GCC unroll 4
    for (int i = 0; i < kh; i++)
#pragma GCC unroll 4
        for (int j = 0; j < kw; j++)
            if (sign) v = sign > 0 ? larger(y[i * W + j], v) : smaller(y[i * W + j], v);
    return v;
}

INLINE void shape_plane(const vec *y, vec *best, vec *out, vec a, vec b, int sign, int norm, int act, int W, int kh, int kw,
                        int PH, int PW, int pitch) {
    for (int h = 0; h < PH; h++)
        for (int w = 0; w < PW; w++) {
            vec v = winner(y + h * kh * W + w * kw, W, kh, kw, sign);
            if (kh * kw > 1) best[h * PW + w] = v;
            out[h * pitch + w] = activate(norm ? v * a + b : v, act);
        }
}

/* out = activation of pooled a y + b; one channel of `out` spans `plane`, one row `pitch`. */
INLINE void shape_forward(const struct channel *c, const vec *y, vec *best, vec *out, int norm, int act, int C, int H, int W,
                          int kh, int kw, int plane, int pitch) {
    int PH = H / kh, PW = W / kw;
    for (int i = 0; i < C; i++, y += H * W, best += PH * PW, out += plane) {
        vec a = fill(norm ? c->a[i] : 1), b = fill(norm ? c->b[i] : 0);
        if (!norm || c->a[i] > 0)
            shape_plane(y, best, out, a, b, 1, norm, act, W, kh, kw, PH, PW, pitch);
        else if (c->a[i] < 0)
            shape_plane(y, best, out, a, b, -1, norm, act, W, kh, kw, PH, PW, pitch);
        else
            shape_plane(y, best, out, a, b, 0, norm, act, W, kh, kw, PH, PW, pitch);
    }
}

/* Takes d back through the activation, in place, and adds up d (first) and d (v - mean) (second) where asked;
 * v: the pooled y, [C][size]. */
INLINE void shape_sums(struct channel *c, const vec *v, vec *d, int norm, int act, int summed, int C, int size) {
    for (int i = 0; i < C; i++, v += size, d += size) {
        vec a = fill(norm ? c->a[i] : 1), b = fill(norm ? c->b[i] : 0), mean = fill(norm ? c->mean[i] : 0), s = {0}, q = {0};
        for (int p = 0; p < size; p++) {
            vec z = norm ? v[p] * a + b : v[p], g = d[p];
            if (act == RELU) g = keep(z > 0.0f, g);
            if (act == TANH) {
                vec t = hyperbolic(z);
                g *= 1.0f - t * t;
            }
            if (act != PLAIN) d[p] = g;
            s += g;
            if (norm) q += g * (v[p] - mean);
        }
        if (summed) c->first[i] += total(s);
        if (norm) c->second[i] += total(q);
    }
}

/* The gradient of y is a d - (level + slope y); `second` becomes gamma's gradient, sum of d xhat. */
INLINE void norm_slopes(struct channel *c, int C, double count) {
    for (int i = 0; i < C; i++) {
        c->second[i] *= c->inverse[i];
        c->slope[i] = c->a[i] * c->inverse[i] * c->second[i] / count;
        c->level[i] = c->a[i] * c->first[i] / count - c->slope[i] * c->mean[i];
    }
}

/* One pooling window: its gradient d goes to the first of equals, as in torch, after which nothing of d is left. */
INLINE void shape_window(const vec *y, vec best, vec d, vec *dy, vec level, vec slope, int norm, int W, int kh, int kw, int pitch) {
#pragma GCC unroll 4
    for (int i = 0; i < kh; i++)
#pragma GCC unroll 4
        for (int j = 0; j < kw; j++) {
            vec v = y[i * W + j], g = keep(v == best, d);
            d -= g;
            dy[i * pitch + j] = norm ? g - (v * slope + level) : g;
        }
}

/* Rows [from, to) of dy from pooled d; one channel of `dy` spans `plane`, one row `pitch`. Empty lanes get 0. */
INLINE void shape_back(const struct channel *c, ivec mask, const vec *y, const vec *best, const vec *d, vec *dy, int norm, int C,
                       int H, int W, int kh, int kw, int from, int to, int plane, int pitch) {
    int PH = H / kh, PW = W / kw;
    for (int i = 0; i < C; i++, y += H * W, best += PH * PW, d += PH * PW, dy += plane) {
        vec a = fill(norm ? c->a[i] : 1);
        vec level = keep(mask, fill(norm ? c->level[i] : 0)), slope = keep(mask, fill(norm ? c->slope[i] : 0));
        for (int h = from; h < to; h++) {
            vec *row = dy + (h - from) * pitch;
            if (kh * kw == 1) {
                for (int w = 0; w < W; w++) {
                    vec g = d[h * W + w];
                    row[w] = norm ? g * a - (y[h * W + w] * slope + level) : g;
                }
                continue;
            }
            if (h % kh == 0 && h / kh < PH)
                for (int w = 0; w < PW; w++) {
                    vec g = d[h / kh * PW + w];
                    shape_window(y + h * W + w * kw, best[h / kh * PW + w], norm ? g * a : g, row + w * kw, level, slope, norm,
                                 W, kh, kw, pitch);
                }
            for (int w = h / kh < PH ? PW * kw : 0; w < W; w++) /* what the windows leave out */
                row[w] = norm ? -(y[h * W + w] * slope + level) : (vec){0};
        }
    }
}

/* Softmax cross-entropy of one tile's logits z (K): per-lane losses; with d, its mean's gradient. */
INLINE void cross_entropy(const struct batch *b, long t, const vec *z, vec *d, float *loss, uint8_t *correct, int K) {
    vec top = z[0], sum = {0};
    ivec which = {0};
    for (int k = 1; k < K; k++) {
        ivec better = z[k] > top;
        top = blend(better, z[k], top);
        which = (better & k) | (~better & which);
    }
    for (int k = 0; k < K; k++) {
        vec e = exponential(z[k] - top);
        if (d) d[k] = e;
        sum += e;
    }
    vec each = keep(filled(b, t), 1.0f / (sum * (float)b->size));
    if (d)
        for (int k = 0; k < K; k++) d[k] *= each;
    for (int i = 0; i < LANES && t * LANES + i < b->size; i++) {
        long k = t * LANES + i, label = b->label[b->order ? b->order[k] : k];
        loss[k] = logf(sum[i]) + (top[i] - z[label][i]);
        if (d) d[label][i] -= 1.0f / b->size;
        if (correct) correct[k] = which[i] == label;
    }
}
