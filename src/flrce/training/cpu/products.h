/* Products of matrices, row by row as torch lays them out. A row of a result is summed in the same order whatever stands
 * above or below it. */

typedef float row __attribute__((vector_size(4 * LANES), aligned(4))); /* anywhere in memory */

enum { DEPTH = 256, COLUMNS = 512, CHUNK = 8 * ROWS };
/* What is known to be 0, or not wanted, of a product between tokens of a causal sequence. */
enum { FULL, ABOVE, LOWER, UPPER }; /* the result below its diagonal is not wanted; a is lower; a is upper triangular */

/* c (R, V vectors) = start, 0 or itself, + the sum over p of a[r, p] b[p]. Three rows share an address. */
#define TILE(R, V)                                                                                                     \
    KERNEL void tile_##R##_##V(const float *a, long ai, long ap, const vec *b, long depth, float *c, long ci,          \
                               const float *start, int adds) {                                                         \
        vec s[R][V];                                                                                                   \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)                                                        \
                s[r][v] = adds ? *(row *)(c + r * ci + v * LANES) : start ? *(const row *)(start + v * LANES) : (vec){0}; \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) /* the sums will be written there */                      \
            for (int v = 0; v < V; v++) __builtin_prefetch(c + r * ci + v * LANES, 1);                                 \
        const float *at[(R + 2) / 3];                                                                                  \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r += 3) at[r / 3] = a + r * ai;                                \
        for (long p = 0; p < depth; p++) {                                                                             \
            vec x[V];                                                                                                  \
            _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) x[v] = b[p * V + v];                                   \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r++) {                                                     \
                vec y = fill(at[r / 3][r % 3 * ai]);                                                                   \
                _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) s[r][v] += y * x[v];                               \
            }                                                                                                          \
            _Pragma("GCC unroll 16") for (int r = 0; r < R; r += 3) at[r / 3] += ap;                                   \
        }                                                                                                              \
        _Pragma("GCC unroll 16") for (int r = 0; r < R; r++)                                                           \
            _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) *(row *)(c + r * ci + v * LANES) = s[r][v];            \
    }
TILES
typedef void tile(const float *, long, long, const vec *, long, float *, long, const float *, int);
static tile *const tiles[ROWS + 1][3] = {{0}, NAMES};

/* b (depth, n) as strips of two vectors, [strip][p][column]: the last is one vector where that suffices, its rest 0. */
static void strips(const float *b, long bp, long bj, long depth, long n, float *to) {
    for (long p = 0; bj == 1 && p < depth; p++, b += bp) {
        long j = 0;
        for (; j + 2 * LANES <= n; j += 2 * LANES) {
            vec *there = (vec *)(to + j * depth) + 2 * p;
            there[0] = *(const row *)(b + j), there[1] = *(const row *)(b + j + LANES);
        }
        long wide = n - j > LANES ? 2 * LANES : LANES;
        for (long i = 0; j < n && i < wide; i++) to[j * depth + p * wide + i] = j + i < n ? b[j + i] : 0;
    }
    for (long j = 0; bj != 1 && j < n; j += LANES) {
        long whole = j / (2 * LANES) * 2 * LANES, wide = n - whole > LANES ? 2 * LANES : LANES, p = 0;
        float *there = to + whole * depth + j - whole;
        for (; bp == 1 && j + LANES <= n && p + LANES <= depth; p += LANES) {
            vec m[LANES];
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) m[l] = *(const row *)(b + (j + l) * bj + p);
            TRANSPOSE(vec, ivec, m)
#pragma GCC unroll 16
            for (int l = 0; l < LANES; l++) *(vec *)(there + (p + l) * wide) = m[l];
        }
        for (; p < depth; p++)
            for (int l = 0; l < LANES; l++) there[p * wide + l] = j + l < n ? b[p * bp + (j + l) * bj] : 0;
    }
}

/* a (depth, m), its columns m neighbours, as [block of rows of the product][p][row]. */
static void turned(const float *a, long ap, long depth, long m, float *to) {
    for (long p = 0; p < depth; p++, a += ap) {
        long i = 0;
        for (long r = 0; r < m; r += 16) __builtin_prefetch(a + 8 * ap + r);
        for (; i + ROWS <= m; i += ROWS) memcpy(to + i * depth + p * ROWS, a + i, 4 * ROWS);
        for (long r = i; r < m; r++) to[i * depth + p * ROWS + r - i] = a[r];
    }
}

/* c (m, n) = start (n) or 0, + a (m, k) b (k, n), each with its strides; c's columns are neighbours. */
void product(const float *a, long ai, long ap, const float *b, long bp, long bj, float *c, long ci, long m, long n, long k,
             const float *start, int shape) {
    static __thread vec panels[DEPTH * COLUMNS / LANES];
    static __thread float near[CHUNK * (DEPTH + LANES)];
    for (long j0 = 0; j0 < n; j0 += COLUMNS)
        for (long p0 = 0; p0 < k; p0 += DEPTH) {
            long n0 = n - j0 < COLUMNS ? n - j0 : COLUMNS, depth = k - p0 < DEPTH ? k - p0 : DEPTH;
            strips(b + p0 * bp + j0 * bj, bp, bj, depth, n0, (float *)panels);
            for (long i0 = 0; i0 < m; i0 += CHUNK) {
                long m0 = m - i0 < CHUNK ? m - i0 : CHUNK;
                const float *from = a + i0 * ai + p0 * ap;
                long fi = ai, fp = ap;
                if (ap == 1 && ai % 1024 == 0) { /* rows that share the cache's few places */
                    fi = DEPTH + LANES;
                    for (long r = 0; r < m0; r++) memcpy(near + r * fi, from + r * ai, 4 * depth);
                    from = near;
                } else if (ap != 1) {
                    turned(from, ap, depth, m0, near);
                    fi = 1, fp = ROWS, from = near;
                }
                for (long i = 0; i < m0; i += ROWS) {
                    long rows = m0 - i < ROWS ? m0 - i : ROWS, first = 0, last = depth;
                    if (shape == LOWER && i0 + i + rows < p0 + last) last = i0 + i + rows - p0;
                    if (shape == UPPER && i0 + i > p0) first = i0 + i - p0;
                    if (first > depth) first = depth;
                    if (last < first) last = first;
                    const float *x = (ap == 1 ? from + i * fi : near + i * depth) + first * fp;
                    for (long j = 0; j < n0; j += 2 * LANES) {
                        int V = n0 - j > LANES ? 2 : 1;
                        long wide = V * LANES, cols = n0 - j < wide ? n0 - j : wide;
                        if (shape == ABOVE && j0 + j + wide <= i0 + i) continue;
                        const vec *panel = panels + j * depth / LANES + first * V;
                        const float *begin = start && !p0 ? start + j0 + j : 0;
                        float *to = c + (i0 + i) * ci + j0 + j;
                        if (cols == wide) {
                            tiles[rows][V](x, fi, fp, panel, last - first, to, ci, begin, p0 > 0);
                            continue;
                        }
                        float edge[2 * LANES], aside[ROWS * 2 * LANES];
                        if (begin) memcpy(edge, begin, 4 * cols), begin = edge;
                        for (long r = 0; p0 && r < rows; r++) memcpy(aside + r * wide, to + r * ci, 4 * cols);
                        tiles[rows][V](x, fi, fp, panel, last - first, aside, wide, begin, p0 > 0);
                        for (long r = 0; r < rows; r++) memcpy(to + r * ci, aside + r * wide, 4 * cols);
                    }
                }
            }
        }
}

/* to (n) = the sum of m rows. */
void columns(const float *x, long m, long n, float *to) {
    memset(to, 0, 4 * n);
    for (long i = 0; i < m; i++, x += n) {
        long j = 0;
        for (; j + LANES <= n; j += LANES) *(row *)(to + j) += *(const row *)(x + j);
        for (; j < n; j++) to[j] += x[j];
    }
}

/* Which of m rows of n have a number that is not 0; returns how many. */
long alive(const float *x, long m, long n, int64_t *which) {
    long found = 0;
    for (long i = 0; i < m; i++, x += n) {
        long j = 0;
        while (j < n && x[j] == 0) j++;
        if (j < n) which[found++] = i;
    }
    return found;
}
