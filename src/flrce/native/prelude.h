/* What every generated trainer shares. A tile is LANES samples side by side: an activation is
 * [tile][channel][row][column] of vec, so that any shape vectorises over the batch. The generated file defines
 * LANES and CHANNELS (the widest layer) before including this text, and passes all other shapes as constants,
 * which inlining folds. No intrinsics: gcc's and clang's vector extensions. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define KERNEL static __attribute__((noinline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1)));

enum { PLAIN, RELU, TANH };

/* One layer's numbers per channel; `start` is what a convolution's sums begin with. */
struct channel {
    float a[CHANNELS], b[CHANNELS], mean[CHANNELS], inverse[CHANNELS], start[CHANNELS], level[CHANNELS], slope[CHANNELS];
    double first[CHANNELS], second[CHANNELS];
    vec sum[CHANNELS], square[CHANNELS];
};

/* The samples of one batch: `order` picks rows of x (NULL: the first `size`). */
struct batch {
    const void *x;
    const int64_t *label, *order;
    int width; /* bytes per value: 1 or 4 */
    float scale, shift;
    long size, tiles;
};

/* One SGD step: pull[i] times the distance from the start is added to tensor i's gradient. */
struct step {
    float lr;
    const float *pull;
};

INLINE vec fill(float v) { return v - (vec){0}; }
INLINE vec blend(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }
INLINE vec keep(ivec mask, vec a) { return (vec)(mask & (ivec)a); }
INLINE vec larger(vec a, vec b) { return blend(a > b, a, b); }
INLINE vec smaller(vec a, vec b) { return blend(a < b, a, b); }

INLINE float total(vec v) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

/* Lanes of tile t that hold a sample of the batch. */
INLINE ivec filled(const struct batch *b, long t) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < (int32_t)(b->size - t * LANES);
}

/* e^x for x up to 88, relative error about 1e-7: x = n ln 2 + r, |r| <= ln 2 / 2, Taylor to r^7. */
INLINE vec exponential(vec x) {
    x = blend(x < -87.0f, fill(-87.0f), x); /* in this order a NaN stays one */
    x = blend(x > 88.0f, fill(88.0f), x);
    vec shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits now hold n */
    vec n = shifted - 12582912.0f;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (vec)((ivec)p + ((ivec)shifted << 23));
}

INLINE vec hyperbolic(vec x) {
    vec t = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    vec tiny = x - x * x * x * (1.0f / 3); /* where the formula above cancels */
    return blend((x < 0.02f) & (x > -0.02f), tiny, t);
}

INLINE vec activate(vec z, int act) {
    if (act == RELU) return keep(~(z <= 0.0f), z); /* lets a NaN through, as torch does */
    return act == TANH ? hyperbolic(z) : z;
}

#ifdef __clang__
#define SHUFFLE(p, q, ...) __builtin_shufflevector(p, q, __VA_ARGS__)
#else
#define SHUFFLE(p, q, ...) __builtin_shuffle(p, q, (ivec){__VA_ARGS__})
#endif

/* m[i][j] <-> m[j][i]: ROUNDS of exchanging halves between rows, LOW_h and HIGH_h are lists of lanes (generated). */
#define ROUND(half)                                                             \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & half)) { \
        vec p = m[i], q = m[i + half];                                          \
        m[i] = SHUFFLE(p, q, LOW_##half);                                       \
        m[i + half] = SHUFFLE(p, q, HIGH_##half);                               \
    }
INLINE void transpose(vec m[LANES]) { ROUNDS }

/* LANES samples of `values` numbers each into one tile; place[i] is where value i goes (padding is skipped).
 * Lanes without a sample repeat the first one: finite, and masked wherever samples are summed. */
INLINE void load_tile(const struct batch *b, long t, vec *tile, const int *place, int values) {
    const char *row[LANES];
    for (int i = 0; i < LANES; i++) {
        long k = t * LANES + i < b->size ? t * LANES + i : 0;
        row[i] = (const char *)b->x + (b->order ? b->order[k] : k) * (long)values * b->width;
    }
    if (values < LANES) {
        for (int v = 0; v < values; v++)
            for (int i = 0; i < LANES; i++)
                tile[place[v]][i] = (b->width == 1 ? ((const uint8_t *)row[i])[v] : ((const float *)row[i])[v]) * b->scale + b->shift;
        return;
    }
    for (int next = 0; next < values; next += LANES) {
        int at = next + LANES <= values ? next : values - LANES;
        vec m[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (b->width == 1)
                m[i] = __builtin_convertvector(*(const bytes *)(row[i] + at), vec);
            else
                m[i] = *(const loose *)(row[i] + 4L * at);
        }
        transpose(m);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) tile[place[at + i]] = m[i] * b->scale + b->shift;
    }
}

/* p -= lr (g + pull (p - origin)), n numbers. */
INLINE void descend(float *p, const float *origin, const float *g, int n, float lr, float pull) {
    for (int i = 0; i < n; i++) p[i] -= lr * (pull != 0 ? g[i] + pull * (p[i] - origin[i]) : g[i]);
}

/* The same where each gradient is still spread over the lanes; p is padded to whole vectors, g to LANES rows. */
INLINE void descend_lanes(float *p, const float *origin, const vec *g, int n, float lr, float pull) {
    for (int at = 0; at < n; at += LANES) {
        vec m[LANES], s = {0};
        for (int i = 0; i < LANES; i++) m[i] = g[at + i];
        transpose(m);
        for (int i = 0; i < LANES; i++) s += m[i];
        vec *w = (vec *)(p + at);
        if (pull != 0) s += pull * (*w - *(const vec *)(origin + at));
        *w -= lr * s;
    }
}

/* Up to LANES inputs of one tile as one vector per sample, `step` apart; missing inputs are 0. */
KERNEL void turn(const vec *x, int inputs, vec *out, int step) {
    vec m[LANES];
    if (inputs >= LANES)
        for (int i = 0; i < LANES; i++) m[i] = x[i];
    else
        for (int i = 0; i < LANES; i++) m[i] = i < inputs ? x[i] : (vec){0};
    transpose(m);
    for (int i = 0; i < LANES; i++) out[i * step] = m[i];
}
