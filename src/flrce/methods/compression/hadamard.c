/* H x of each row of x (rows, size), in place, size a power of two: butterflies (a, b) -> (a + b, a - b) over
 * distances size / 2, size / 4, ..., 1. Two distances are one walk through memory; every value is the result of the
 * same float32 additions and subtractions in the same order as distance by distance. */
#define SIDE 16 /* distances below are done in tiles of SIDE x SIDE floats, which are turned for it */

static void butterflies(float *restrict a, float *restrict b, long count) {
    for (long i = 0; i < count; i++) {
        float sum = a[i] + b[i], difference = a[i] - b[i];
        a[i] = sum;
        b[i] = difference;
    }
}

/* Distances 2 h and h over a block of 4 h floats. */
static void two_distances(float *restrict x, long h) {
    float *restrict p = x, *restrict q = x + h, *restrict r = x + 2 * h, *restrict s = x + 3 * h;
    for (long i = 0; i < h; i++) {
        float a = p[i] + r[i], b = q[i] + s[i], c = p[i] - r[i], d = q[i] - s[i];
        p[i] = a + b;
        q[i] = a - b;
        r[i] = c + d;
        s[i] = c - d;
    }
}

/* Distances 8, 4, 2, 1 within SIDE * SIDE floats. */
static void tile(float *restrict x) {
    float turned[SIDE][SIDE];
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) turned[j][i] = x[i * SIDE + j];
    for (int h = SIDE / 2; h; h /= 2)
        for (int j = 0; j < SIDE; j += 2 * h)
            for (int k = j; k < j + h; k++) butterflies(turned[k], turned[k + h], SIDE);
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) x[i * SIDE + j] = turned[j][i];
}

void hadamard(float *x, long rows, long size) {
    long least = size >= SIDE * SIDE ? SIDE : 1; /* distances from here on */
    for (long row = 0; row < rows; row++, x += size) {
        long h = size / 2;
        for (; h / 2 >= least; h /= 4)
            for (long at = 0; at < size; at += 2 * h) two_distances(x + at, h / 2);
        for (; h >= least; h /= 2)
            for (long at = 0; at < size; at += 2 * h) butterflies(x + at, x + at + h, h);
        if (least > 1)
            for (long at = 0; at < size; at += SIDE * SIDE) tile(x + at);
    }
}
