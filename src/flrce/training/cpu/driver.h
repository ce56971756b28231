/* The functions Python calls. A workspace belongs to one call at a time and starts out zeroed. */

static void take(float *p, const float *w) {
    for (int s = 0; s < SLOTS; s++)
        for (int r = 0; r < slots[s].rows; r++)
            memcpy(p + slots[s].inner + r * slots[s].pitch, w + slots[s].flat + r * slots[s].cols, 4 * slots[s].cols);
}

static void give(const float *p, float *w) {
    for (int s = 0; s < SLOTS; s++)
        for (int r = 0; r < slots[s].rows; r++)
            memcpy(w + slots[s].flat + r * slots[s].cols, p + slots[s].inner + r * slots[s].pitch, 4 * slots[s].cols);
}

/* What multiplies the distance from the start: mu, or mu over the tensor's distance (0 where there is none). */
static void pulls(struct net *n, float mu, int squared) {
    for (int s = 0; s < SLOTS; s++) {
        double distance = 0;
        for (int i = 0; mu != 0 && !squared && i < slots[s].rows * slots[s].pitch; i++) {
            double d = n->p[slots[s].inner + i] - n->origin[slots[s].inner + i];
            distance += d * d;
        }
        n->pull[s] = squared ? mu : distance > 0 ? mu / sqrt(distance) : 0;
    }
}

long workspace(long tiles) {
    struct net n;
    return carve(&n, 0, tiles);
}

void train(char *memory, long tiles, float *w, const void *x, int width, const int64_t *label, float scale, float shift,
           const int64_t *order, const int64_t *sizes, long steps, float lr, float mu, int squared, int first, float *losses,
           float *squares) {
    struct net n;
    carve(&n, memory, tiles);
    n.q = n.p;
    take(n.p, w);
    take(n.origin, w);
    begin(&n);
    for (long i = 0; i < steps; order += sizes[i++]) {
        struct batch b = {x, label, order, width, scale, shift, sizes[i], (sizes[i] + LANES - 1) / LANES};
        struct step step = {lr, n.pull};
        pulls(&n, mu, squared);
        forward(&n, &b, first);
        for (long t = 0; t < b.tiles; t++) cross_entropy(&b, t, logits(&n) + t * CLASSES, slope(&n) + t * CLASSES, n.loss, 0, CLASSES);
        double sum = 0, square = 0;
        for (long k = 0; k < b.size; k++) {
            sum += n.loss[k];
            square += (double)n.loss[k] * n.loss[k];
        }
        losses[i] = sum / b.size;
        squares[i] = square / b.size;
        backward(&n, &b, &step, first);
    }
    give(n.p, w);
}

/* The gradient of one batch's mean loss, g, and each sample's loss; of w only running statistics change. */
void gradient(char *memory, long tiles, float *w, const void *x, int width, const int64_t *label, float scale, float shift, long size,
              int first, float *g, float *losses) {
    struct net n;
    carve(&n, memory, tiles);
    n.q = n.origin; /* nothing pulls, so that nobody asks for the start */
    take(n.p, w);
    for (int s = 0; s < SLOTS; s++) memset(n.q + slots[s].inner, 0, 4l * slots[s].rows * slots[s].pitch);
    begin(&n);
    pulls(&n, 0, 1);
    struct batch b = {x, label, 0, width, scale, shift, size, (size + LANES - 1) / LANES};
    struct step step = {-1, n.pull};
    forward(&n, &b, first);
    for (long t = 0; t < b.tiles; t++) cross_entropy(&b, t, logits(&n) + t * CLASSES, slope(&n) + t * CLASSES, losses, 0, CLASSES);
    backward(&n, &b, &step, first);
    for (int s = 0; s < SLOTS; s++)
        for (int r = 0; r < slots[s].rows; r++) {
            long inner = slots[s].inner + r * slots[s].pitch, flat = slots[s].flat + r * slots[s].cols;
            if (slots[s].trained) memcpy(g + flat, n.q + inner, 4 * slots[s].cols);
            else memcpy(w + flat, n.p + inner, 4 * slots[s].cols);
        }
}

void evaluate(char *memory, long tiles, const float *w, const void *x, int width, const int64_t *label, float scale, float shift,
              long size, long sample, uint8_t *correct, float *losses) {
    struct net n;
    carve(&n, memory, tiles);
    take(n.p, w);
    for (long at = 0; at < size; at += tiles * LANES) {
        long here = size - at < tiles * LANES ? size - at : tiles * LANES;
        struct batch b = {(const char *)x + at * sample * width, label + at, 0, width, scale, shift, here, (here + LANES - 1) / LANES};
        forward(&n, &b, 1 << 30);
        for (long t = 0; t < b.tiles; t++) cross_entropy(&b, t, logits(&n) + t * CLASSES, 0, losses + at, correct + at, CLASSES);
    }
}
