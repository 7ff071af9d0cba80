/* Matrix products of few rows: with weights in panels, and with blocks of KV.
 *
 * Every sum has one order, from the first input to the last, whatever rows and columns stand beside it.
 */
#include <stdint.h>

#include "vectors.h"

typedef struct {
    const void *panels; /* NULL: there is no such product */
    const float *bias;  /* [O], or NULL */
    int64_t inputs, outputs, bf16;
} Matrix;

/* c[rows][vectors] = (add ? c : 0) + a[rows][depth] @ b[depth][vectors], `panels` of them side by side. */
INLINE void tile(const int rows, const int panels, const int vectors, const int bf16, const int add,
                 const float *a, int64_t a_stride, const void *b, int64_t b_stride, int64_t panel_stride,
                 int64_t depth, float *c, int64_t c_stride) {
    Vector sum[TILE_ROWS * VECTORS > LONE_PANELS * VECTORS ? TILE_ROWS * VECTORS : LONE_PANELS * VECTORS];
    const int wide = panels * vectors;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < wide; v++) sum[r * wide + v] = add ? load(c + r * c_stride + v * LANES) : splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vector w[LONE_PANELS * VECTORS];
#pragma GCC unroll 16
        for (int v = 0; v < wide; v++)
            w[v] = load_stored(b, v / vectors * panel_stride + k * b_stride + v % vectors * LANES, bf16);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            Vector x = splat(a[r * a_stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < wide; v++) sum[r * wide + v] += x * w[v];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
        for (int v = 0; v < wide; v++) store(c + r * c_stride + v * LANES, sum[r * wide + v]);
}

#define ROWS_CASE(n)                                                                                     \
    case n:                                                                                              \
        tile(n, panels, vectors, bf16, add, a, a_stride, b, b_stride, panel_stride, depth, c, c_stride); \
        return;

/* The same for up to TILE_ROWS rows, known when it runs. */
INLINE void tile_of(int64_t rows, const int panels, const int vectors, const int bf16, const int add,
                    const float *a, int64_t a_stride, const void *b, int64_t b_stride, int64_t panel_stride,
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

#define PANEL_TILES(BF16, ADD)                                                                            \
    for (int64_t r = 0; r < rows; r += height)                                                            \
        tile_of(rows - r < height ? rows - r : height, 1, VECTORS, BF16, ADD, x + r * x_stride, x_stride, \
                panel, PANEL, 0, inputs, out + r * out_stride, out_stride)

/* One panel of outputs for all rows. */
static void panel_product(const float *x, int64_t x_stride, int64_t rows, const void *panel, int bf16,
                          int64_t inputs, int add, float *out, int64_t out_stride) {
    const int64_t height = tile_height(rows);
    if (bf16 && add)
        PANEL_TILES(1, 1);
    else if (bf16)
        PANEL_TILES(1, 0);
    else if (add)
        PANEL_TILES(0, 1);
    else
        PANEL_TILES(0, 0);
}

#define LONE_TILE(BF16, ADD) \
    tile(1, LONE_PANELS, VECTORS, BF16, ADD, x, 0, panel, PANEL, inputs * PANEL, inputs, out, 0)

/* LONE_PANELS panels for one row. */
static void lone_product(const float *x, const void *panel, int bf16, int64_t inputs, int add, float *out) {
    if (bf16 && add)
        LONE_TILE(1, 1);
    else if (bf16)
        LONE_TILE(1, 0);
    else if (add)
        LONE_TILE(0, 1);
    else
        LONE_TILE(0, 0);
}

INLINE int64_t panels_of(const Matrix *m) { return (m->outputs + PANEL - 1) / PANEL; }

/* Panels first to first + count of a product. */
static void product(const Matrix *m, const float *x, int64_t x_stride, int64_t rows, int64_t first,
                    int64_t count, int add, float *out, int64_t out_stride) {
    const int64_t size = m->inputs * PANEL * (m->bf16 ? 2 : 4);
    int64_t p = first, stop = first + count;
    while (p < stop) {
        const char *panel = (const char *)m->panels + p * size;
        int64_t step = 1;
        if (rows == 1 && stop - p >= LONE_PANELS) {
            step = LONE_PANELS;
            lone_product(x, panel, m->bf16, m->inputs, add, out + p * PANEL);
        } else
            panel_product(x, x_stride, rows, panel, m->bf16, m->inputs, add, out + p * PANEL, out_stride);
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
        float *to = c + r * c_stride;
        int64_t column = 0;
#define BLOCK_TILE(V, BF16, ADD)                                                                            \
    tile_of(n, 1, V, BF16, ADD, at, a_stride, base + column * (BF16 ? 2 : 4), columns, 0, depth, to + column, \
            c_stride)
        for (; column + PANEL <= columns; column += PANEL)
            if (bf16 && add)
                BLOCK_TILE(VECTORS, 1, 1);
            else if (bf16)
                BLOCK_TILE(VECTORS, 1, 0);
            else if (add)
                BLOCK_TILE(VECTORS, 0, 1);
            else
                BLOCK_TILE(VECTORS, 0, 0);
        for (; column + LANES <= columns; column += LANES)
            if (bf16 && add)
                BLOCK_TILE(1, 1, 1);
            else if (bf16)
                BLOCK_TILE(1, 1, 0);
            else if (add)
                BLOCK_TILE(1, 0, 1);
            else
                BLOCK_TILE(1, 0, 0);
        for (; column < columns; column++)
            for (int64_t row = 0; row < n; row++) {
                float sum = add ? to[row * c_stride + column] : 0;
                for (int64_t k = 0; k < depth; k++)
                    sum = fused(at[row * a_stride + k], one_stored(base, k * columns + column, bf16), sum);
                to[row * c_stride + column] = sum;
            }
    }
}
