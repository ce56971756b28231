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
typedef int32_t loose __attribute__((vector_size(4 * LANES), aligned(1)));

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
#define SHUFFLE(p, q, mask, ...) __builtin_shufflevector(p, q, __VA_ARGS__)
#else
#define SHUFFLE(p, q, mask, ...) __builtin_shuffle(p, q, (mask){__VA_ARGS__})
#endif

/* m[i][j] <-> m[j][i] by log2(LANES) perfect shuffles of whole rows; LOW and HIGH interleave two rows' halves,
 * and the generated SHUFFLES says how often. */
#define TRANSPOSE(type, mask, m)                                        \
    _Pragma("GCC unroll 4") for (int round = 0; round < SHUFFLES; round++) {     \
        type from[LANES];                                               \
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) from[i] = m[i]; \
        _Pragma("GCC unroll 8") for (int i = 0; i < LANES / 2; i++) {    \
            m[2 * i] = SHUFFLE(from[i], from[i + LANES / 2], mask, LOW);  \
            m[2 * i + 1] = SHUFFLE(from[i], from[i + LANES / 2], mask, HIGH); \
        }                                                               \
    }

/* One value of each of LANES samples, the slow way. */
INLINE vec gather(const struct batch *b, const char *const *row, int at) {
    vec v;
    for (int i = 0; i < LANES; i++) v[i] = b->width == 1 ? ((const uint8_t *)row[i])[at] : ((const float *)row[i])[at];
    return v;
}

/* LANES samples of `values` numbers each into one tile; place[i] is where value i goes (padding is skipped).
 * Bytes move in fours, as an int's (little-endian). A last piece that does not fill a vector starts earlier, overlapping.
 * Lanes without a sample repeat the first one: finite, and masked wherever samples are summed. */
INLINE void load_tile(const struct batch *b, long t, vec *tile, const int *place, int values) {
    const char *row[LANES];
    for (int i = 0; i < LANES; i++) {
        long k = t * LANES + i < b->size ? t * LANES + i : 0;
        row[i] = (const char *)b->x + (b->order ? b->order[k] : k) * (long)values * b->width;
    }
    vec scale = fill(b->scale), shift = fill(b->shift);
    int piece = b->width == 1 ? 4 * LANES : LANES;
    if (values < piece) {
        for (int v = 0; v < values; v++) tile[place[v]] = gather(b, row, v) * scale + shift;
        return;
    }
    for (int next = 0; next < values; next += piece) {
        int at = next + piece <= values ? next : values - piece;
        const int *to = place + at;
        ivec m[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) m[i] = *(const loose *)(row[i] + (long)at * b->width);
        TRANSPOSE(ivec, ivec, m)
        if (b->width == 1) {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    tile[to[4 * i + j]] = __builtin_convertvector((m[i] >> (8 * j)) & 255, vec) * scale + shift;
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) tile[to[i]] = (vec)m[i] * scale + shift;
        }
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
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) m[i] = g[at + i];
        TRANSPOSE(vec, ivec, m)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) s += m[i];
        vec *w = (vec *)(p + at);
        if (pull != 0) s += pull * (*w - *(const vec *)(origin + at));
        *w -= lr * s;
    }
}

/* Up to LANES inputs of one tile as one vector per sample, `step` apart; missing inputs are 0. */
KERNEL void turn(const vec *x, int inputs, vec *out, int step) {
    vec m[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) m[i] = i < inputs ? x[i] : (vec){0};
    TRANSPOSE(vec, ivec, m)
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) out[i * step] = m[i];
}
