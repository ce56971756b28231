/* Layers of transformers, row by row as torch lays them out: GELU's way back, and attention, upon products.h. */

/* e^(-x^2 / 2) and the normal distribution's share below x: Abramowitz and Stegun 7.1.26, to 1.5e-7 of erf. */
INLINE vec share(vec x, vec *bell) {
    vec z = x * 0.70710678f, sign = blend(z < 0.0f, fill(-1.0f), fill(1.0f)), far = z * sign;
    vec t = 1.0f / (1.0f + 0.3275911f * far);
    vec sum = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    *bell = exponential(-z * z);
    return 0.5f + 0.5f * sign * (1.0f - sum * *bell);
}

INLINE vec some(const float *x, long left) {
    vec v = {0};
    if (left >= LANES) return *(const row *)x;
    memcpy(&v, x, 4 * left);
    return v;
}

INLINE void put(float *to, vec v, long left) {
    if (left >= LANES) *(row *)to = v;
    else memcpy(to, &v, 4 * left);
}

/* dx = dy times the slope of x times the share below x. */
void gelu_back(const float *x, const float *dy, float *dx, long n) {
    for (long i = 0; i < n; i += LANES) {
        vec v = some(x + i, n - i), bell, below = share(v, &bell);
        put(dx + i, some(dy + i, n - i) * (below + v * 0.39894228f * bell), n - i);
    }
}

/* Attention between L tokens that ask and S that are seen. Scores lie as [seen][pitch], those who ask side by side:
 * what is summed over all that one sees needs no sums across a vector. Causal: token l sees the first l + 1. */
INLINE ivec sees(long seen, long asks) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane >= (int32_t)(seen - asks);
}

/* How many any of the tokens asks, asks + 1, ... of a vector sees. */
INLINE long within(long S, long asks, int causal) { return causal && asks + LANES < S ? asks + LANES : S; }

/* Scores become shares of 1; what is not seen is 0. */
static void softmax(float *s, long S, long pitch, float scale, int causal) {
    for (long l = 0; l < pitch; l += LANES) {
        long n = within(S, l, causal), all = causal && l < n ? l : n;
        vec most = fill(-INFINITY), sum = {0}, *at = (vec *)(s + l);
        long next = pitch / LANES;
        for (long j = 0; j < all; j++) most = larger(at[j * next], most);
        for (long j = all; j < n; j++) most = blend(sees(j, l) & (at[j * next] > most), at[j * next], most);
        for (long j = 0; j < all; j++) sum += at[j * next] = exponential((at[j * next] - most) * scale);
        for (long j = all; j < n; j++) sum += at[j * next] = keep(sees(j, l), exponential((at[j * next] - most) * scale));
        vec part = 1.0f / sum;
        for (long j = 0; j < n; j++) at[j * next] *= part;
        for (long j = n; j < S; j++) at[j * next] = (vec){0};
    }
}

/* The scores' gradients, from those of the shares p, of tokens from l on. */
static void softmax_back(const float *p, float *g, long S, long l, long pitch, float scale, int causal) {
    for (; l < pitch; l += LANES) {
        long n = within(S, l, causal), next = pitch / LANES;
        const vec *share = (const vec *)(p + l);
        vec dot = {0}, *at = (vec *)(g + l);
        for (long j = 0; j < n; j++) dot += at[j * next] * share[j * next];
        for (long j = 0; j < n; j++) at[j * next] = (at[j * next] - dot) * share[j * next] * scale;
        for (long j = n; j < S; j++) at[j * next] = (vec){0};
    }
}

/* Where token l of sample n and head h has its numbers: n at[0] + h at[1] + l at[2]. */
struct place {
    long at[3];
};
#define AT(x, i) ((x) + n * w[i].at[0] + h * w[i].at[1]), w[i].at[2]
#define OF(x, i) AT(x, i), 1  /* as rows of numbers */
#define BY(x, i) (x) + n * w[i].at[0] + h * w[i].at[1], 1, w[i].at[2] /* as columns */

/* out = softmax(scale q k^T) v for N samples and H heads of D numbers; p: [N H][S][pitch] where they are kept, else one. */
void attend(const float *q, const float *k, const float *v, float *out, float *p, const struct place *w, const long *size,
            float scale, int causal, int kept) {
    long N = size[0], H = size[1], L = size[2], S = size[3], D = size[4], pitch = size[5];
    for (long n = 0; n < N; n++)
        for (long h = 0; h < H; h++, p += kept ? S * pitch : 0) {
            product(OF(k, 1), BY(q, 0), p, pitch, S, L, D, 0, causal ? ABOVE : FULL);
            for (long j = 0; j < S; j++)
                for (long l = L; l < pitch; l++) p[j * pitch + l] = 0;
            softmax(p, S, pitch, scale, causal);
            product(p, 1, pitch, OF(v, 2), AT(out, 3), L, D, S, 0, causal ? LOWER : FULL);
        }
}

/* The first of L tokens whose gradient is not 0, or one up to a vector before it: a loss may be of the last one alone. */
static long early(const float *d, long next, long L, long D) {
    long l = 0;
    for (; l < L - 1; l++)
        for (long i = 0; i < D; i++)
            if (d[l * next + i] != 0) return l / LANES * LANES;
    return l / LANES * LANES;
}

/* The gradients of q, k and v, from those of out; g: [S][pitch] to work in. Whoever asks in vain is left out. */
void attend_back(const float *q, const float *k, const float *v, const float *dout, const float *p, float *dq, float *dk,
                 float *dv, float *g, const struct place *w, const long *size, float scale, int causal) {
    long N = size[0], H = size[1], S = size[3], D = size[4], pitch = size[5];
    memset(g, 0, 4 * S * pitch);
    for (long n = 0; n < N; n++)
        for (long h = 0; h < H; h++, p += S * pitch) {
            long l = early(AT(dout, 3), size[2], D), L = size[2] - l;
            int above = causal && !l ? ABOVE : FULL, lower = causal && !l ? LOWER : FULL, upper = causal && !l ? UPPER : FULL;
            const float *from = q + l * w[0].at[2], *d = dout + l * w[3].at[2];
            float *to = dq + l * w[4].at[2];
            product(p + l, pitch, 1, OF(d, 3), AT(dv, 6), S, D, L, 0, upper);
            product(OF(v, 2), BY(d, 3), g + l, pitch, S, L, D, 0, above);
            softmax_back(p, g, S, l, pitch, scale, causal);
            product(g + l, 1, pitch, OF(k, 1), AT(to, 4), L, D, S, 0, lower);
            product(g + l, pitch, 1, OF(from, 0), AT(dk, 5), S, D, L, 0, upper);
            for (long i = 0; i < l; i++)
                for (long j = 0; j < D; j++) dq[n * w[4].at[0] + h * w[4].at[1] + i * w[4].at[2] + j] = 0;
        }
}
