/* What lies between the products of a decoder layer, forward and backward: norms, rotary attention, SwiGLU.
 *
 * Numbers are float32 or bf16 where they are stored, and float32 in registers. Every sum has one order, so that
 * bits do not depend on the number of threads. Rows of a packed batch are sequences one after another; those of a
 * group share its first rows, their common prefix, as if each had its own copy.
 */
#include "threads.h"
#include "vectors.h"

#include <math.h>

#define NORM_ROWS 64       /* of an item: their gradients of the weights are one partial sum */
#define ITEM_NUMBERS 16384 /* of an element-wise item */
#define QUERIES 16         /* rows of attention at a time */
#if LANES == 16
#define STRIP 8 /* rows of a product whose sums stay in registers, two vectors each */
#else
#define STRIP 4
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

INLINE void store_stored(void *base, int64_t index, int bf16, Vector v) {
    if (!bf16) {
        store((float *)base + index, v);
        return;
    }
    const Words bits = (Words)v, nan = (Words)(v != v);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
    memcpy((uint16_t *)base + index, &half, sizeof half);
}

/* The last numbers of a row, fewer than a vector; what is missing is 0. */
static Vector load_rest(const void *base, int64_t index, int bf16, int64_t count) {
    float part[LANES] = {0};
    for (int64_t i = 0; i < count; i++) part[i] = one_stored(base, index + i, bf16);
    return load(part);
}

static void store_rest(void *base, int64_t index, int bf16, int64_t count, Vector v) {
    float part[LANES];
    store(part, v);
    for (int64_t i = 0; i < count; i++) put_stored(base, index + i, bf16, part[i]);
}

INLINE Vector get(const void *base, int64_t index, int bf16, int64_t count) {
    return count >= LANES ? load_stored(base, index, bf16) : load_rest(base, index, bf16, count);
}

INLINE void put(void *base, int64_t index, int bf16, int64_t count, Vector v) {
    if (count >= LANES)
        store_stored(base, index, bf16, v);
    else
        store_rest(base, index, bf16, count, v);
}

INLINE float total(Vector v) {
    float part[LANES], sum = 0;
    store(part, v);
    for (int i = 0; i < LANES; i++) sum += part[i];
    return sum;
}

/* Root mean square norms: sum = x + delta, out = sum * scale * weight, scale = 1 / rms(sum). */

typedef struct {
    const float *x, *weight;
    const void *delta; /* NULL: nothing is added, and `sum` is x itself */
    float *sum, *scale;
    void *out;
    int64_t rows, width;
    int delta_bf16, out_bf16;
    float eps;
} NormForward;

static void norm_rows(const void *given, Phase *phase, int64_t thread) {
    const NormForward *n = given;
    (void)thread;
    EACH(item, (n->rows + NORM_ROWS - 1) / NORM_ROWS, 1) {
        for (int64_t row = item * NORM_ROWS; row < least(n->rows, (item + 1) * NORM_ROWS); row++) {
            const int64_t at = row * n->width;
            const float *sum = n->delta ? n->sum + at : n->x + at;
            Vector squares = splat(0);
            for (int64_t i = 0; i < n->width; i += LANES) {
                const int64_t left = n->width - i;
                Vector x = get(n->x, at + i, 0, left);
                if (n->delta) {
                    x += get(n->delta, at + i, n->delta_bf16, left);
                    put(n->sum, at + i, 0, left, x);
                }
                squares += x * x;
            }
            const float scale = 1.0f / sqrtf(total(squares) / (float)n->width + n->eps);
            n->scale[row] = scale;
            for (int64_t i = 0; i < n->width; i += LANES) {
                const int64_t left = n->width - i;
                const Vector x = get(sum, i, 0, left) * splat(scale) * get(n->weight, i, 0, left);
                put(n->out, at + i, n->out_bf16, left, x);
            }
        }
    }
}

typedef struct {
    const float *sum, *weight, *scale, *grad_sum; /* grad_sum: of the sum's other users, or NULL */
    const void *grad_out;
    float *grad, *partial; /* of the sum; of the weights, one row for each item */
    int64_t rows, width;
    int out_bf16;
} NormBackward;

static void norm_rows_back(const void *given, Phase *phase, int64_t thread) {
    const NormBackward *n = given;
    (void)thread;
    EACH(item, (n->rows + NORM_ROWS - 1) / NORM_ROWS, 1) {
        float *partial = n->partial + item * n->width;
        memset(partial, 0, n->width * sizeof *partial);
        for (int64_t row = item * NORM_ROWS; row < least(n->rows, (item + 1) * NORM_ROWS); row++) {
            const int64_t at = row * n->width;
            const Vector scale = splat(n->scale[row]);
            Vector dots = splat(0);
            for (int64_t i = 0; i < n->width; i += LANES) {
                const int64_t left = n->width - i;
                const Vector back = get(n->grad_out, at + i, n->out_bf16, left);
                const Vector normed = get(n->sum, at + i, 0, left) * scale;
                put(partial, i, 0, left, get(partial, i, 0, left) + back * normed);
                dots += back * get(n->weight, i, 0, left) * normed;
            }
            const Vector mean = splat(total(dots) / (float)n->width);
            for (int64_t i = 0; i < n->width; i += LANES) {
                const int64_t left = n->width - i;
                const Vector back = get(n->grad_out, at + i, n->out_bf16, left) * get(n->weight, i, 0, left);
                Vector grad = scale * (back - get(n->sum, at + i, 0, left) * scale * mean);
                if (n->grad_sum) grad += get(n->grad_sum, at + i, 0, left);
                put(n->grad, at + i, 0, left, grad);
            }
        }
    }
}

/* SwiGLU: out = gate * sigmoid(gate) * up. */

typedef struct {
    const void *gate, *up, *grad_out;
    void *out, *grad_gate, *grad_up;
    int64_t numbers;
    int bf16;
} Gated;

INLINE Vector sigmoid(Vector x) { return splat(1) / (splat(1) + exponential(-x)); }

static void gate_numbers(const void *given, Phase *phase, int64_t thread) {
    const Gated *n = given;
    (void)thread;
    EACH(item, (n->numbers + ITEM_NUMBERS - 1) / ITEM_NUMBERS, 1) {
        const int64_t end = least(n->numbers, (item + 1) * ITEM_NUMBERS);
        for (int64_t i = item * ITEM_NUMBERS; i < end; i += LANES) {
            const Vector gate = get(n->gate, i, n->bf16, end - i), up = get(n->up, i, n->bf16, end - i);
            put(n->out, i, n->bf16, end - i, gate * sigmoid(gate) * up);
        }
    }
}

static void gate_numbers_back(const void *given, Phase *phase, int64_t thread) {
    const Gated *n = given;
    (void)thread;
    EACH(item, (n->numbers + ITEM_NUMBERS - 1) / ITEM_NUMBERS, 1) {
        const int64_t end = least(n->numbers, (item + 1) * ITEM_NUMBERS);
        for (int64_t i = item * ITEM_NUMBERS; i < end; i += LANES) {
            const Vector gate = get(n->gate, i, n->bf16, end - i), up = get(n->up, i, n->bf16, end - i);
            const Vector back = get(n->grad_out, i, n->bf16, end - i), open = sigmoid(gate);
            put(n->grad_up, i, n->bf16, end - i, back * gate * open);
            const Vector slope = open * (splat(1) + gate * (splat(1) - open));
            put(n->grad_gate, i, n->bf16, end - i, back * up * slope);
        }
    }
}

#include "attention.h"

#define ITEMS(n, of) (((n) + (of)-1) / (of))

int64_t dora_norm_partials(int64_t rows) { return ITEMS(rows, NORM_ROWS); }

int dora_norm(const NormForward *n, int64_t threads) {
    return run_together(norm_rows, n, 1, least(threads, ITEMS(n->rows, NORM_ROWS)));
}

int dora_norm_back(const NormBackward *n, int64_t threads) {
    return run_together(norm_rows_back, n, 1, least(threads, ITEMS(n->rows, NORM_ROWS)));
}

int dora_gate(const Gated *n, int64_t threads) {
    return run_together(gate_numbers, n, 1, least(threads, ITEMS(n->numbers, ITEM_NUMBERS)));
}

int dora_gate_back(const Gated *n, int64_t threads) {
    return run_together(gate_numbers_back, n, 1, least(threads, ITEMS(n->numbers, ITEM_NUMBERS)));
}

int dora_attend(Attention *a, int64_t threads) { return attend(a, threads, attend_group); }

int dora_attend_back(Attention *a, int64_t threads) { return attend(a, threads, attend_group_back); }
