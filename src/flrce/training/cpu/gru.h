/* What is sequential in a GRU layer of H units: the product of states and weights, step by step, and the gates r, z, n.
 * A tile is LANES samples. Rows of x, out, dout and d are units, gate by gate, their columns (step, tile); `kept` is
 * [step][unit][tile][4]. `states` and `gates` are the generated products; the first step begins at zero. */

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

/* x: what the inputs give to each gate, biases included; b: the biases that go with the states. Without `kept` there is
 * no way back. */
void steps_forward(const vec *x, const float *w, const float *b, vec *out, vec *kept, vec *work, long steps, long tiles) {
    vec *h = work, *g = work + tiles * H;
    long row = steps * tiles;
    memset(h, 0, sizeof(vec) * tiles * H);
    for (long t = 0; t < steps; t++) {
        states(h, w, b, g, tiles);
        for (int j = 0; j < H; j++)
            for (long i = 0; i < tiles; i++) {
                const vec *a = x + j * row + t * tiles + i, *c = g + i * 3 * H + j;
                vec r = sigmoid(a[0] + c[0]), z = sigmoid(a[H * row] + c[H]), n = hyperbolic(a[2 * H * row] + r * c[2 * H]);
                out[j * row + t * tiles + i] = h[i * H + j] = n + z * (h[i * H + j] - n);
                if (!kept) continue;
                kept[0] = r, kept[1] = z, kept[2] = n, kept[3] = c[2 * H];
                kept += 4;
            }
    }
}

/* d: gradients of r, z, n by what the inputs give, and of n by what the states give. */
void steps_back(const vec *dout, const vec *out, const vec *kept, const float *w, vec *d, vec *work, long steps, long tiles) {
    vec *dh = work, *g = work + tiles * H, *past = g + tiles * 3 * H;
    long row = steps * tiles;
    memset(dh, 0, sizeof(vec) * tiles * H);
    for (long t = steps - 1; t >= 0; t--) {
        const vec *k = kept + 4 * t * tiles * H;
        for (int j = 0; j < H; j++)
            for (long i = 0; i < tiles; i++, k += 4) {
                long at = j * row + t * tiles + i;
                vec r = k[0], z = k[1], n = k[2], old = t ? out[at - tiles] : (vec){0}, v = dh[i * H + j] + dout[at];
                vec dn = v * (1.0f - z) * (1.0f - n * n), dz = v * (old - n) * z * (1.0f - z), dr = dn * k[3] * r * (1.0f - r);
                vec *c = g + i * 3 * H + j;
                d[at] = c[0] = dr, d[at + H * row] = c[H] = dz, d[at + 2 * H * row] = dn;
                d[at + 3 * H * row] = c[2 * H] = dn * r;
                past[i * H + j] = v * z;
            }
        if (!t) return;
        gates(g, w, dh, tiles);
        for (long i = 0; i < tiles * H; i++) dh[i] += past[i];
    }
}
