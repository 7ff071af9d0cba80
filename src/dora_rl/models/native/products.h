/* Matrix products of few rows: with weights in panels, and with blocks of KV.
 *
 * Every sum has one order, from the first input to the last, whatever rows and columns stand beside it.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

/* How the right side of a product is stored, and multiplied. */
enum Stored {
    FLOATS,
    HALVES, /* bf16, widened on its way into a register, which is exact */
    PAIRS,  /* bf16, two inputs of an output side by side; widened likewise */
    DOTS,   /* the same, multiplied pair by pair: the left side is bf16, too */
};

typedef struct {
    const void *panels; /* NULL: there is no such product */
    const float *bias;  /* [O], or NULL */
    int64_t inputs, outputs, stored;
} Matrix;

typedef struct { /* rows of the left side */
    const float *wide;
    const uint16_t *narrow; /* the same in bf16: where a product is of DOTS */
    int64_t stride;
} Inputs;

INLINE Inputs from_row(Inputs x, int64_t row) {
    x.wide += row * x.stride;
    if (x.narrow) x.narrow += row * x.stride;
    return x;
}

/* sum[rows][wide] += a[rows] * w[wide] */
INLINE void add_products(const int rows, const int wide, const float *a, int64_t a_stride, const Vector *w,
                         Vector *sum) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        const Vector x = splat(a[r * a_stride]);
#pragma GCC unroll 16
        for (int v = 0; v < wide; v++) sum[r * wide + v] += x * w[v];
    }
}

/* c[rows][vectors] = (add ? c : 0) + a[rows][depth] @ b[depth][vectors], `panels` of them side by side.
 * Strides of b count what is loaded at once: numbers, or pairs of them. */
INLINE void tile(const int rows, const int panels, const int vectors, const enum Stored stored, const int add,
                 Inputs a, const void *b, int64_t b_stride, int64_t panel_stride, int64_t depth, float *c,
                 int64_t c_stride) {
    Vector sum[TILE_ROWS * VECTORS > LONE_PANELS * VECTORS ? TILE_ROWS * VECTORS : LONE_PANELS * VECTORS];
    const int wide = panels * vectors;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < wide; v++) sum[r * wide + v] = add ? load(c + r * c_stride + v * LANES) : splat(0);
#define AT(k, v) ((v) / vectors * panel_stride + (k) * b_stride + (v) % vectors * LANES)
    if (stored == FLOATS || stored == HALVES)
        for (int64_t k = 0; k < depth; k++) {
            Vector w[LONE_PANELS * VECTORS];
#pragma GCC unroll 16
            for (int v = 0; v < wide; v++) w[v] = load_stored(b, AT(k, v), stored == HALVES);
            add_products(rows, wide, a.wide + k, a.stride, w, sum);
        }
    else if (stored == PAIRS)
        for (int64_t k = 0; k < depth; k += 2) {
            Vector w[LONE_PANELS * VECTORS];
#pragma GCC unroll 16
            for (int v = 0; v < wide; v++) w[v] = one_of_pairs(load_words(b, AT(k / 2, v)), 0);
            add_products(rows, wide, a.wide + k, a.stride, w, sum);
            if (k + 1 == depth) break;
#pragma GCC unroll 16
            for (int v = 0; v < wide; v++) w[v] = one_of_pairs(load_words(b, AT(k / 2, v)), 1);
            add_products(rows, wide, a.wide + k + 1, a.stride, w, sum);
        }
    else
        for (int64_t k = 0; k < depth; k += 2) {
            Words w[LONE_PANELS * VECTORS];
#pragma GCC unroll 16
            for (int v = 0; v < wide; v++) w[v] = load_words(b, AT(k / 2, v));
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, a.narrow + r * a.stride + k, sizeof pair);
                const Words x = pair - (Words){0};
#pragma GCC unroll 16
                for (int v = 0; v < wide; v++) sum[r * wide + v] = add_dots(sum[r * wide + v], x, w[v]);
            }
        }
#undef AT
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < wide; v++) store(c + r * c_stride + v * LANES, sum[r * wide + v]);
}

#define ROWS_CASE(n)                                                                            \
    case n:                                                                                     \
        tile(n, panels, vectors, stored, add, a, b, b_stride, panel_stride, depth, c, c_stride); \
        return;

/* The same for up to TILE_ROWS rows, known when it runs. */
INLINE void tile_of(int64_t rows, const int panels, const int vectors, const enum Stored stored,
                    const int add, Inputs a, const void *b, int64_t b_stride, int64_t panel_stride,
                    int64_t depth, float *c, int64_t c_stride) {
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
#if TILE_ROWS > 6
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
#endif
    }
}

/* Rows are split evenly: a tile of 12 and one of 1 take longer than two of 6 and 7. */
INLINE int64_t tile_height(int64_t rows) {
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return (rows + tiles - 1) / tiles;
}

/* Calls MACRO with a constant for each way of storing that weights have, and for `add`. */
#define BY_STORED(MACRO)                                        \
    switch (stored * 2 + !!add) {                               \
        case FLOATS * 2: MACRO(FLOATS, 0); break;               \
        case FLOATS * 2 + 1: MACRO(FLOATS, 1); break;           \
        case PAIRS * 2: MACRO(PAIRS, 0); break;                 \
        case PAIRS * 2 + 1: MACRO(PAIRS, 1); break;             \
        case DOTS * 2: MACRO(DOTS, 0); break;                   \
        case DOTS * 2 + 1: MACRO(DOTS, 1); break;               \
    }

#define PANEL_TILES(STORED, ADD)                                                                        \
    for (int64_t r = 0; r < rows; r += height)                                                          \
    tile_of(rows - r < height ? rows - r : height, 1, VECTORS, STORED, ADD, from_row(x, r), panel, PANEL, \
            0, inputs, out + r * out_stride, out_stride)

/* One panel of outputs for all rows. */
static void panel_product(Inputs x, int64_t rows, const void *panel, enum Stored stored, int64_t inputs,
                          int add, float *out, int64_t out_stride) {
    const int64_t height = tile_height(rows);
    BY_STORED(PANEL_TILES)
}

/* What is loaded at once, of the inputs of one output. */
INLINE int64_t units_of(enum Stored stored, int64_t inputs) {
    return stored == FLOATS ? inputs : (inputs + 1) / 2;
}

#define LONE_TILE(STORED, ADD)                                                                              \
    tile(1, LONE_PANELS, VECTORS, STORED, ADD, x, panel, PANEL, units_of(STORED, inputs) * PANEL, inputs, out, \
         0)

/* LONE_PANELS panels for one row. */
static void lone_product(Inputs x, const void *panel, enum Stored stored, int64_t inputs, int add,
                         float *out) {
    BY_STORED(LONE_TILE)
}

INLINE int64_t panels_of(const Matrix *m) { return (m->outputs + PANEL - 1) / PANEL; }

/* Panels first to first + count of a product. */
static void product(const Matrix *m, Inputs x, int64_t rows, int64_t first, int64_t count, int add,
                    float *out, int64_t out_stride) {
    if (!rows) return; /* no tile has a height then */
    const int64_t size = units_of(m->stored, m->inputs) * PANEL * sizeof(float);
    int64_t p = first, stop = first + count;
    while (p < stop) {
        const char *panel = (const char *)m->panels + p * size;
        int64_t step = 1;
        if (rows == 1 && stop - p >= LONE_PANELS) {
            step = LONE_PANELS;
            lone_product(x, panel, m->stored, m->inputs, add, out + p * PANEL);
        } else
            panel_product(x, rows, panel, m->stored, m->inputs, add, out + p * PANEL, out_stride);
        p += step;
    }
    if (m->bias) {
        int64_t end = stop * PANEL < m->outputs ? stop * PANEL : m->outputs;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = first * PANEL; o < end; o++) out[r * out_stride + o] += m->bias[o];
    }
}

/* c[rows][columns] = (add ? c : 0) + a[rows][depth] @ b[depth][columns]: a product with a block of KV. */
static void block_product(int64_t rows, const float *a, int64_t a_stride, const void *b, int64_t b_at,
                          int64_t columns, int bf16, int64_t depth, int add, float *c, int64_t c_stride) {
    const char *base = (const char *)b + b_at * (bf16 ? 2 : 4);
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        const int64_t n = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
        const float *at = a + r * a_stride;
        const Inputs left = {at, NULL, a_stride};
        float *to = c + r * c_stride;
        int64_t column = 0;
#define BLOCK_TILE(V, STORED, ADD)                                                                        \
    tile_of(n, 1, V, STORED, ADD, left, base + column * (STORED == HALVES ? 2 : 4), columns, 0, depth, \
            to + column, c_stride)
        for (; column + PANEL <= columns; column += PANEL)
            if (bf16 && add)
                BLOCK_TILE(VECTORS, HALVES, 1);
            else if (bf16)
                BLOCK_TILE(VECTORS, HALVES, 0);
            else if (add)
                BLOCK_TILE(VECTORS, FLOATS, 1);
            else
                BLOCK_TILE(VECTORS, FLOATS, 0);
        for (; column + LANES <= columns; column += LANES)
            if (bf16 && add)
                BLOCK_TILE(1, HALVES, 1);
            else if (bf16)
                BLOCK_TILE(1, HALVES, 0);
            else if (add)
                BLOCK_TILE(1, FLOATS, 1);
            else
                BLOCK_TILE(1, FLOATS, 0);
        for (; column < columns; column++)
            for (int64_t row = 0; row < n; row++) {
                float sum = add ? to[row * c_stride + column] : 0;
                for (int64_t k = 0; k < depth; k++)
                    sum = fused(at[row * a_stride + k], one_stored(base, k * columns + column, bf16), sum);
                to[row * c_stride + column] = sum;
            }
    }
}
