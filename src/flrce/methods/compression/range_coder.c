/* An adaptive binary range coder for symbols of a few bits; range_coder.py has the same in Python.
 * All arithmetic is on integers, so every machine writes and reads the same bytes. */
#include <stdint.h>
#include <stdlib.h>

enum { LEAST = 32, MOST = 65504, PATIENCE = 60 };

typedef struct {
    uint16_t p; /* of a 1, in 65536ths */
    uint16_t seen;
} Estimate;

static Estimate *make_table(long count)
{
    Estimate *table = malloc(count * sizeof *table);
    for (long i = 0; table && i < count; i++) {
        table[i].p = 32768;
        table[i].seen = 0;
    }
    return table;
}

static void learn(Estimate *e, int bit)
{
    int64_t step = ((bit ? 65535 : 0) - (int64_t)e->p) * (131072 / (2 * e->seen + 3));
    int64_t p = e->p + (step >> 16);
    e->p = p < LEAST ? LEAST : p > MOST ? MOST : p;
    if (e->seen < PATIENCE)
        e->seen++;
}

static uint32_t split(uint32_t low, uint32_t high, uint32_t p)
{
    uint32_t range = high - low;
    return low + (range >> 16) * p + ((range & 0xffff) * p >> 16);
}

/* Bytes written to out, or -1 where `room` bytes are not enough or there is no memory. */
long encode_symbols(const uint8_t *symbols, long n, int bits, int history, uint8_t *out, long room)
{
    uint32_t low = 0, high = 0xffffffff, past = 0, mask = (1u << history) - 1;
    Estimate *table = make_table(1L << (history + bits));
    long at = 0;
    if (!table)
        return -1;
    for (long i = 0; i < n; i++) {
        uint32_t node = 1;
        for (int k = bits - 1; k >= 0; k--) {
            Estimate *e = table + ((past & mask) << bits | node);
            int bit = symbols[i] >> k & 1;
            uint32_t middle = split(low, high, e->p);
            if (bit)
                high = middle;
            else
                low = middle + 1;
            learn(e, bit);
            node = node * 2 + bit;
            for (; !((low ^ high) >> 24); low <<= 8, high = high << 8 | 255) {
                if (at >= room - 4) {
                    free(table);
                    return -1;
                }
                out[at++] = high >> 24;
            }
        }
        past = past << bits | symbols[i];
    }
    free(table);
    for (int shift = 24; shift >= 0; shift -= 8) { /* the shortest number in [low, high] */
        uint64_t rest = (1ull << shift) - 1, value = (low + rest) & ~rest;
        if (value <= high) {
            for (int k = 24; k >= shift; k -= 8)
                out[at++] = value >> k;
            break;
        }
    }
    return at;
}

/* How many bytes were shifted in behind the first four; -1: no memory, -2: n symbols need more than
 * these bytes. `bounds`: low and high at the end. */
long decode_symbols(const uint8_t *data, long size, uint8_t *symbols, long n, int bits, int history,
                    uint32_t *bounds)
{
    uint32_t low = 0, high = 0xffffffff, past = 0, mask = (1u << history) - 1, value = 0;
    Estimate *table = make_table(1L << (history + bits));
    long at = 0;
    if (!table)
        return -1;
    for (; at < 4; at++)
        value = value << 8 | (at < size ? data[at] : 0);
    for (long i = 0; i < n; i++) {
        uint32_t node = 1;
        for (int k = 0; k < bits; k++) {
            Estimate *e = table + ((past & mask) << bits | node);
            uint32_t middle = split(low, high, e->p);
            int bit = value <= middle;
            if (bit)
                high = middle;
            else
                low = middle + 1;
            learn(e, bit);
            node = node * 2 + bit;
            for (; !((low ^ high) >> 24); low <<= 8, high = high << 8 | 255, at++) {
                if (at - 4 >= size) { /* the last byte is behind all that are shifted in */
                    free(table);
                    return -2;
                }
                value = value << 8 | (at < size ? data[at] : 0);
            }
        }
        symbols[i] = node - (1u << bits);
        past = past << bits | symbols[i];
    }
    free(table);
    bounds[0] = low;
    bounds[1] = high;
    return at - 4;
}
