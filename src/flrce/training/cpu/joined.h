/* Where a skip meets what it skips, per tile. */

/* out = activation of a + b, or of a where there is no b; every frame has its own distance of channels and rows. */
INLINE void sum_forward(const vec *a, const vec *b, vec *out, int act, int C, int H, int W, int a_plane, int a_pitch, int b_plane,
                        int b_pitch, int plane, int pitch) {
    for (int i = 0; i < C; i++)
        for (int h = 0; h < H; h++) {
            const vec *p = a + i * a_plane + h * a_pitch, *q = b + i * b_plane + h * b_pitch;
            for (int w = 0; w < W; w++) out[i * plane + h * pitch + w] = activate(b ? p[w] + q[w] : p[w], act);
        }
}

/* d through the activation, by what came out, to the gradients of a and b; each is added to what is there if asked. */
INLINE void sum_back(const vec *out, const vec *d, vec *da, int add_a, vec *db, int add_b, int act, int C, int H, int W, int plane,
                     int pitch) {
    for (int i = 0; i < C; i++)
        for (int h = 0; h < H; h++)
            for (int w = 0; w < W; w++) {
                vec z = out[i * plane + h * pitch + w], g = d[(i * H + h) * W + w];
                int at = (i * H + h) * W + w;
                if (act == RELU) g = keep(z > 0.0f, g);
                if (act == TANH) g *= 1.0f - z * z;
                if (da) da[at] = add_a ? da[at] + g : g;
                if (db) db[at] = add_b ? db[at] + g : g;
            }
}

INLINE void more(vec *d, const vec *g, int n) {
    for (int i = 0; i < n; i++) d[i] += g[i];
}
