/* Passes over a round's updates, (rows, d) float32 with `stride` floats from row to row, each value widened once.
 * Sums are made in a fixed order, whatever the machine has else to do. gcc's and clang's vector extensions. */
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 8
#else
#define LANES 4
#endif

#define COLUMNS 256 /* at a time: those of ten rows, widened, stay in the first caches */
#define DOWN 4      /* rows of a tile of products, */
#define ACROSS 2    /* and columns: that many sums fit the registers */

typedef double vec __attribute__((vector_size(8 * LANES)));

static void widened(const float *restrict from, double *restrict to, long count) {
    for (long c = 0; c < count; c++) to[c] = from[c];
    for (long c = count; c < COLUMNS; c++) to[c] = 0;
}

static void products(const double *wide, long P, double *G) {
    for (long i = 0; i < P; i += DOWN)
        for (long j = i; j < P; j += ACROSS) {
            vec sum[DOWN][ACROSS];
            memset(sum, 0, sizeof sum);
            for (long c = 0; c < COLUMNS; c += LANES)
                for (int r = 0; r < DOWN; r++)
                    for (int q = 0; q < ACROSS; q++)
                        sum[r][q] += *(const vec *)(wide + (i + r) * COLUMNS + c) *
                                     *(const vec *)(wide + (j + q) * COLUMNS + c);
            for (int r = 0; r < DOWN; r++)
                for (int q = 0; q < ACROSS; q++)
                    for (int lane = 0; lane < LANES; lane++) G[(i + r) * P + j + q] += sum[r][q][lane];
        }
}

/* The upper triangle of G (P, P), on zeros: dot products of all pairs of rows. P is a multiple of DOWN, and `wide` has
 * room for P * COLUMNS doubles, on zeros, where a vector may begin. */
void gram(const float *U, long rows, long stride, long d, long P, double *wide, double *G) {
    for (long start = 0; start < d; start += COLUMNS) {
        long count = d - start < COLUMNS ? d - start : COLUMNS;
        for (long r = 0; r < rows; r++) widened(U + r * stride + start, wide + r * COLUMNS, count);
        products(wide, P, G);
    }
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
    for (long block = 0; block * k < d; block++) {
        long count = d - block * k < k ? d - block * k : k;
        const int8_t *restrict sign = signs + block * k;
        for (long r = 0; r < rows; r++) {
            const float *restrict u = U + r * stride + block * k;
            float *restrict into = found + r * 2 * k + offsets[block];
            for (long c = 0; c < count; c++) into[c] += sign[c] * u[c];
        }
    }
}
