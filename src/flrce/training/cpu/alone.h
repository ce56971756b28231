/* Stages without a product: pooling that is not part of another stage, averages, and GroupNorm, per tile. */

/* Pooling with overlap or padding: clipped windows. */
INLINE void pool_forward(const vec *in, vec *out, int C, int H, int W, int kh, int kw, int sh, int sw, int ph, int pw, int PH, int PW,
                         int plane, int pitch) {
    for (int i = 0; i < C; i++, in += H * W, out += plane)
        for (int h = 0; h < PH; h++)
            for (int w = 0; w < PW; w++) {
                vec v = fill(-INFINITY);
                for (int p = h * sh - ph; p < h * sh - ph + kh; p++)
                    for (int q = w * sw - pw; q < w * sw - pw + kw; q++)
                        if (p >= 0 && p < H && q >= 0 && q < W) v = larger(in[p * W + q], v);
                out[h * pitch + w] = v;
            }
}

INLINE void pool_back(const vec *in, const vec *d, vec *dx, int C, int H, int W, int kh, int kw, int sh, int sw, int ph, int pw,
                      int PH, int PW) {
    memset(dx, 0, sizeof(vec) * C * H * W);
    vec v;
    for (int i = 0; i < C; i++, in += H * W, dx += H * W, d += PH * PW)
        for (int h = 0; h < PH; h++)
            for (int w = 0; w < PW; w++) {
                pool_forward(in, &v, 1, H, W, kh, kw, 0, 0, ph - h * sh, pw - w * sw, 1, 1, 0, 0);
                ivec open = (ivec){0} == 0;
                for (int p = h * sh - ph; p < h * sh - ph + kh; p++)
                    for (int q = w * sw - pw; q < w * sw - pw + kw; q++)
                        if (p >= 0 && p < H && q >= 0 && q < W) {
                            ivec hit = (in[p * W + q] == v) & open;
                            open &= ~hit;
                            dx[p * W + q] += keep(hit, d[h * PW + w]);
                        }
            }
}

/* Means of windows; none is clipped. */
INLINE void average_forward(const vec *in, vec *out, int C, int H, int W, int kh, int kw, int sh, int sw, int PH, int PW, int plane,
                            int pitch) {
    for (int i = 0; i < C; i++, in += H * W, out += plane)
        for (int h = 0; h < PH; h++)
            for (int w = 0; w < PW; w++) {
                vec s = {0};
                for (int p = h * sh; p < h * sh + kh; p++)
                    for (int q = w * sw; q < w * sw + kw; q++) s += in[p * W + q];
                out[h * pitch + w] = s * (1.0f / (kh * kw));
            }
}

INLINE void average_back(const vec *d, vec *dx, int C, int H, int W, int kh, int kw, int sh, int sw, int PH, int PW) {
    memset(dx, 0, sizeof(vec) * C * H * W);
    for (int i = 0; i < C; i++, dx += H * W, d += PH * PW)
        for (int h = 0; h < PH; h++)
            for (int w = 0; w < PW; w++) {
                vec g = d[h * PW + w] * (1.0f / (kh * kw));
                for (int p = h * sh; p < h * sh + kh; p++)
                    for (int q = w * sw; q < w * sw + kw; q++) dx[p * W + q] += g;
            }
}

/* GroupNorm and activation of one tile. Groups are neighbouring channels, so each is one run of n numbers; every lane has
 * its own statistics, kept in `moments` as mean and inverse deviation. */
INLINE void group_forward(const vec *x, vec *out, vec *moments, const float *gamma, const float *beta, float eps, int act, int groups,
                          int C, int H, int W, int plane, int pitch) {
    int each = C / groups, n = each * H * W;
    for (int g = 0; g < groups; g++, moments += 2) {
        vec sum = {0}, square = {0}, inverse;
        for (int i = 0; i < n; i++) sum += x[i];
        vec mean = sum * (1.0f / n);
        for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
        for (int i = 0; i < LANES; i++) inverse[i] = 1 / sqrtf(square[i] / n + eps);
        moments[0] = mean, moments[1] = inverse;
        for (int c = g * each; c < (g + 1) * each; c++, out += plane)
            for (int h = 0; h < H; h++)
                for (int w = 0; w < W; w++, x++) {
                    vec z = (*x - mean) * inverse;
                    out[h * pitch + w] = activate(z * (gamma ? gamma[c] : 1) + (beta ? beta[c] : 0), act);
                }
    }
}

/* Adds up beta's gradient (first) and gamma's (second); d is taken back through the activation in place, and with dx on to
 * the input: inverse (d' - mean of d' - xhat mean of d' xhat), d' = gamma d. Empty lanes have d = 0. */
INLINE void group_back(struct channel *c, const vec *x, vec *d, vec *dx, const vec *moments, const float *gamma, const float *beta,
                       int act, int groups, int C, int H, int W) {
    int each = C / groups, size = H * W, n = each * size;
    for (int g = 0; g < groups; g++, x += n, d += n, moments += 2) {
        vec mean = moments[0], inverse = moments[1], sum = {0}, product = {0};
        for (int i = 0; i < each; i++) {
            int k = g * each + i;
            vec a = fill(gamma ? gamma[k] : 1), b = fill(beta ? beta[k] : 0), s = {0}, q = {0};
            for (int p = i * size; p < (i + 1) * size; p++) {
                vec xhat = (x[p] - mean) * inverse, z = xhat * a + b, v = d[p];
                if (act == RELU) v = keep(z > 0.0f, v);
                if (act == TANH) {
                    vec t = hyperbolic(z);
                    v *= 1.0f - t * t;
                }
                d[p] = v;
                s += v;
                q += v * xhat;
            }
            c->first[k] += total(s);
            c->second[k] += total(q);
            sum += a * s;
            product += a * q;
        }
        if (!dx) continue;
        sum *= 1.0f / n, product *= 1.0f / n;
        for (int i = 0; i < each; i++) {
            vec a = fill(gamma ? gamma[g * each + i] : 1);
            for (int p = i * size; p < (i + 1) * size; p++)
                dx[p] = inverse * (a * d[p] - sum - (x[p] - mean) * inverse * product);
        }
        dx += n;
    }
}

