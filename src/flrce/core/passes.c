/* Passes over a round's updates, (rows, d) float32 with `stride` floats from row to row, each value widened once.
 * Sums are made in a fixed order, whatever the machine has else to do. gcc's and clang's vector extensions. */
#include <stdint.h>
#include <string.h>

/* A tile of products has TILE rows and columns: that many sums, and the values of TILE columns, fit the registers. */
#ifdef __AVX512F__
#define LANES 8
#define TILE 5
#else
#define LANES 4
#define TILE 3
#endif

#define COLUMNS 256 /* at a time: those of ten rows, widened, stay in the first caches */
#define BLOCKS 8    /* blocks of a sketch for one row after the other: their signs and its sums stay there too */

typedef double vec __attribute__((vector_size(8 * LANES)));

/* `gram` wants a multiple of so many rows. */
long count_tile_rows(void) { return TILE; }

/* Rows lie far apart: the processor does not foresee that each goes on after the others' turn. */
static void prefetch(const float *from) {
    for (long c = 0; c < COLUMNS; c += 16) __builtin_prefetch(from + 2 * COLUMNS + c, 0, 3);
}

static void widened(const float *restrict from, double *restrict to, long count) {
    prefetch(from);
    for (long c = 0; c < count; c++) to[c] = from[c];
    for (long c = count; c < COLUMNS; c++) to[c] = 0;
}

/* The sums of one tile's products over COLUMNS columns of its rows and of its columns, added to G from the first lane
 * to the last. On the diagonal, where rows are columns, only the upper half is made. */
static inline __attribute__((always_inline)) void add_tile(const double *rows, const double *columns, long P, double *G,
                                                           int diagonal) {
    vec sum[TILE][TILE];
    memset(sum, 0, sizeof sum);
    for (long c = 0; c < COLUMNS; c += LANES) {
        vec across[TILE];
        for (int q = 0; q < TILE; q++) across[q] = *(const vec *)(columns + q * COLUMNS + c);
        for (int r = 0; r < TILE; r++) {
            vec down = *(const vec *)(rows + r * COLUMNS + c);
            for (int q = diagonal ? r : 0; q < TILE; q++) sum[r][q] += down * across[q];
        }
    }
    for (int r = 0; r < TILE; r++)
        for (int lane = 0; lane < LANES; lane++)
            for (int q = 0; q < TILE; q++) G[r * P + q] += sum[r][q][lane];
}

static void products(const double *wide, long P, double *G) {
    for (long i = 0; i < P; i += TILE) {
        const double *rows = wide + i * COLUMNS;
        add_tile(rows, rows, P, G + i * P + i, 1);
        for (long j = i + TILE; j < P; j += TILE) add_tile(rows, wide + j * COLUMNS, P, G + i * P + j, 0);
    }
}

/* The upper triangle of G (P, P), on zeros: dot products of all pairs of rows. P is a multiple of TILE, and `wide` has
 * room for P * COLUMNS doubles, on zeros, where a vector may begin. */
void gram(const float *U, long rows, long stride, long d, long P, double *wide, double *G) {
    for (long start = 0; start < d; start += COLUMNS) {
        long count = d - start < COLUMNS ? d - start : COLUMNS;
        for (long r = 0; r < rows; r++) widened(U + r * stride + start, wide + r * COLUMNS, count);
        products(wide, P, G);
    }
}

/* made = values - w. Returns the bits of the largest magnitude; a NaN's are above those of all numbers. */
uint32_t subtract(const float *restrict values, const float *restrict w, long d, float *restrict made) {
    uint32_t most = 0;
    for (long c = 0; c < d; c++) {
        uint32_t bits;
        made[c] = values[c] - w[c];
        memcpy(&bits, made + c, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

/* made = w + sum n_r u_r / weight; where the mean is 0, w as it is, for -0.0 + 0.0 would lose its sign. */
void mean(const float *U, long rows, long stride, long d, const double *n, double weight, const float *w, float *made) {
    double total[COLUMNS];
    for (long start = 0; start < d; start += COLUMNS) {
        long count = d - start < COLUMNS ? d - start : COLUMNS;
        memset(total, 0, sizeof total);
        for (long r = 0; r < rows; r++) {
            const float *restrict u = U + r * stride + start;
            for (long c = 0; c < count; c++) total[c] += n[r] * u[c];
        }
        for (long c = 0; c < count; c++) {
            double step = total[c] / weight;
            made[start + c] = step == 0 ? w[start + c] : (float)(w[start + c] + step);
        }
    }
}

/* found (rows, 2 k), on zeros: blocks of k coordinates with their signs, each added from its offset on. */
void turned(const float *U, long rows, long stride, long d, const int8_t *signs, const int64_t *offsets, long k,
            float *found) {
    long blocks = (d + k - 1) / k;
    for (long first = 0; first < blocks; first += BLOCKS)
        for (long r = 0; r < rows; r++)
            for (long block = first; block < blocks && block < first + BLOCKS; block++) {
                long count = d - block * k < k ? d - block * k : k;
                const int8_t *restrict sign = signs + block * k;
                const float *restrict u = U + r * stride + block * k;
                float *restrict into = found + r * 2 * k + offsets[block];
                for (long c = 0; c < count; c++) into[c] += sign[c] * u[c];
            }
}
