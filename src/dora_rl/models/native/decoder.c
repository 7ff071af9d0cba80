/* One pass of a decoder over rows of several versions: Llama, Qwen2, Qwen3.
 *
 * A row is one token of one sequence. Sums are fp32. Weights and KV may be stored in bf16 and are widened on their way
 * into a register, which is exact; or, where that is asked for, what is multiplied with weights is rounded to bf16 as
 * well. A row's numbers depend on nothing but the row, whichever rows stand beside it, whichever thread takes it and
 * however many there are.
 *
 * R rows, I inputs and O outputs of a product, K key/value heads, D head width, T tokens of a block. Keys of a block
 * are [K][D][T], values [K][T][D]. Buffers of rows have strides that are multiples of PANEL.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "products.h"
#include "threads.h"

/* What Python hands over: structures.py has the same fields. */

enum Product { QKV, OUT, GATE, UP, DOWN, PRODUCTS, HEAD };

typedef struct {
    const float *attention_norm, *qk_norm, *mlp_norm; /* qk_norm: [q heads + k heads][D], or NULL */
    Matrix products[PRODUCTS];
} Layer;

typedef struct {
    const void *embedding; /* [vocabulary][hidden] */
    int64_t embedding_bf16;
    const Layer *layers;
    const float *norm;
    Matrix head;
} Weights;

typedef struct { /* rows start to stop go through these weights */
    int64_t start, stop;
    const Weights *weights;
} Span;

typedef struct { /* what an adapter adds to one product: x @ lower @ upper */
    Matrix lower, upper;
} Delta;

typedef struct { /* rows start to stop have this adapter */
    int64_t start, stop;
    const Delta *deltas; /* [layer][product] */
} AdapterSpan;

typedef struct { /* rows of one adapter that are multiplied at once */
    int64_t start, stop, adapter;
} AdapterTile;

typedef struct {
    int64_t layers, hidden, inner, heads, kv_heads, width;
    double eps;
    /* KV pool */
    void *keys, *values;
    int64_t num_blocks, block_tokens, kv_bf16;
} Shape;

typedef struct {
    int64_t rows, num_spans, num_adapters, num_tiles;
    int64_t dots; /* whether products of weights are of DOTS */
    int64_t rank; /* outputs of the widest `lower` of any adapter */
    const Span *spans;
    const AdapterSpan *adapters;
    const AdapterTile *tiles;
    const int64_t *tokens, *positions; /* [R] */
    const float *cosines, *sines;      /* [position][D / 2] */
    const int64_t *places;             /* [R]: block * T + offset of the row's own key and value */
    const int64_t *first;              /* [R]: where the row's blocks begin in `blocks` */
    const int64_t *shared, *own;       /* [R]: tokens in its prompt's blocks, then in its own */
    const int64_t *blocks;
    float *logits; /* [R][logits_stride], or NULL */
    int64_t logits_stride;
    int64_t longest; /* tokens that a row reads, at most, with room for a block and a vector more */
    float *workspace;
} Batch;

/* What lies between the products */

static void normalise(const float *x, const float *weight, int64_t width, double eps, float *out) {
    float sums[LANES] = {0};
    for (int64_t i = 0; i < width; i++) sums[i % LANES] += x[i] * x[i];
    double total = 0;
    for (int i = 0; i < LANES; i++) total += sums[i];
    const float scale = (float)(1.0 / sqrt(total / (double)width + eps));
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

/* In place. */
static void rotate(float *x, const float *cosine, const float *sine, int64_t width, float scale) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half];
        x[i] = (low * cosine[i] - high * sine[i]) * scale;
        x[i + half] = (high * cosine[i] + low * sine[i]) * scale;
    }
}

/* gate = silu(gate) * up, for a panel of columns. */
static void gated(float *gate, const float *up) {
    for (int v = 0; v < VECTORS; v++) {
        Vector g = load(gate + v * LANES), u = load(up + v * LANES);
        store(gate + v * LANES, g / (splat(1.0f) + exponential(-g)) * u);
    }
}

/* scores[0 .. count] = e^(score - largest); their sum. Room for a vector more. */
static float exponentials(float *scores, int64_t count) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    Vector sums = splat(0);
    for (int64_t i = 0; i < count; i += LANES) {
        Vector e = exponential(load(scores + i) - splat(largest));
        store(scores + i, e);
        if (i + LANES > count)
            for (int l = count - i; l < LANES; l++) e[l] = 0;
        sums += e;
    }
    float total = 0;
    for (int l = 0; l < LANES; l++) total += sums[l];
    return total;
}

/* The rows of a pass */

typedef struct { /* buffers of rows, each with its stride */
    float *x, *normed, *heads, *attended, *inner;
    uint16_t *narrow_normed, *narrow_attended, *narrow_inner; /* for products of DOTS, else NULL */
    float *low, *low_of_up; /* x @ lower, of an adapter's product; of its gate and up at once */
    int64_t x_stride, heads_stride, attended_stride, inner_stride, low_stride;
    float *scratch; /* of each thread: scores, then a panel for each row */
    int64_t scratch_size;
} Buffers;

typedef struct {
    const Shape *shape;
    const Batch *batch;
    Buffers buffers;
    int64_t threads;
} Pass;

INLINE int64_t rounded(int64_t size) { return (size + PANEL - 1) / PANEL * PANEL; }

/* The floats that the buffers take, from `at` on. */
static int64_t lay_out(const Shape *s, const Batch *b, int64_t threads, float *at, Buffers *f) {
    f->x_stride = rounded(s->hidden);
    f->heads_stride = rounded((s->heads + 2 * s->kv_heads) * s->width);
    f->attended_stride = rounded(s->heads * s->width);
    f->inner_stride = rounded(s->inner);
    f->low_stride = rounded(b->rank);
    f->scratch_size = rounded(s->heads / s->kv_heads * b->longest) + b->rows * PANEL;
    int64_t used = 0;
#define TAKE(name, size) f->name = at + used, used += size
    TAKE(x, b->rows * f->x_stride);
    TAKE(normed, b->rows * f->x_stride);
    TAKE(heads, b->rows * f->heads_stride);
    TAKE(attended, b->rows * f->attended_stride);
    TAKE(inner, b->rows * f->inner_stride);
    TAKE(low, b->rows * f->low_stride);
    TAKE(low_of_up, b->rows * f->low_stride);
    TAKE(scratch, threads * f->scratch_size);
#undef TAKE
#define TAKE_NARROW(name, stride)                                                                        \
    f->narrow_##name = b->dots ? (uint16_t *)(at + used) : NULL, used += b->dots ? b->rows * (stride) / 2 : 0
    TAKE_NARROW(normed, f->x_stride);
    TAKE_NARROW(attended, f->attended_stride);
    TAKE_NARROW(inner, f->inner_stride);
#undef TAKE_NARROW
    return used;
}

/* Phases */

INLINE const Weights *weights_of(const Batch *b, int64_t row) {
    const Span *span = b->spans;
    while (row >= span->stop) span++;
    return span->weights;
}

static void embed(const Pass *pass, Phase *phase) {
    const Shape *s = pass->shape;
    const Batch *b = pass->batch;
    const Buffers *f = &pass->buffers;
    EACH(row, b->rows, 4) {
        const Weights *w = weights_of(b, row);
        float *x = f->x + row * f->x_stride;
        for (int64_t h = 0; h < s->hidden; h++)
            x[h] = one_stored(w->embedding, b->tokens[row] * s->hidden + h, w->embedding_bf16);
        memset(x + s->hidden, 0, (f->x_stride - s->hidden) * sizeof *x);
    }
    wait_for(phase, b->rows);
}

/* normed = norm(x), by the weight at this place of a layer, or by the last one of all. */
enum Norm { ATTENTION_NORM, MLP_NORM, LAST_NORM };

static void normalise_rows(const Pass *pass, Phase *phase, int64_t layer, enum Norm which) {
    const Batch *b = pass->batch;
    const Buffers *f = &pass->buffers;
    EACH(row, b->rows, 4) {
        const Weights *w = weights_of(b, row);
        float *normed = f->normed + row * f->x_stride;
        const float *norm = which == LAST_NORM  ? w->norm
                            : which == MLP_NORM ? w->layers[layer].mlp_norm
                                                : w->layers[layer].attention_norm;
        normalise(f->x + row * f->x_stride, norm, pass->shape->hidden, pass->shape->eps, normed);
        if (b->dots) narrow(normed, pass->shape->hidden, f->narrow_normed + row * f->x_stride);
    }
    wait_for(phase, b->rows);
}

/* The first half of what adapters add: low = x @ lower, TILE_ROWS rows of an adapter at a time. */
static void lower_rows(const Pass *pass, Phase *phase, int64_t layer, enum Product which, Inputs x,
                       float *low) {
    const Batch *b = pass->batch;
    const Buffers *f = &pass->buffers;
    EACH(tile, b->num_tiles, 1) {
        const AdapterSpan *span = b->adapters + b->tiles[tile].adapter;
        const Matrix *m = &span->deltas[layer * PRODUCTS + which].lower;
        if (!m->panels) continue;
        const int64_t row = b->tiles[tile].start, rows = b->tiles[tile].stop - row;
        product(m, from_row(x, row), rows, 0, panels_of(m), 0, low + row * f->low_stride, f->low_stride);
    }
    wait_for(phase, b->num_tiles);
}

/* The second half: panels of out += low @ upper, for the rows of each adapter within start to stop. */
static void add_upper(const Pass *pass, int64_t layer, enum Product which, const float *low, int64_t start,
                      int64_t stop, int64_t panel, int64_t count, float *out, int64_t out_stride) {
    const Batch *b = pass->batch;
    const int64_t low_stride = pass->buffers.low_stride;
    for (const AdapterSpan *span = b->adapters; span < b->adapters + b->num_adapters; span++) {
        const Matrix *m = &span->deltas[layer * PRODUCTS + which].upper;
        const int64_t from = span->start > start ? span->start : start;
        const int64_t to = span->stop < stop ? span->stop : stop;
        if (m->panels && from < to) {
            const Inputs x = {low + from * low_stride, NULL, low_stride};
            product(m, x, to - from, panel, count, 1, out + (from - start) * out_stride, out_stride);
        }
    }
}

INLINE const Matrix *matrix_of(const Weights *w, int64_t layer, enum Product which) {
    return which == HEAD ? &w->head : &w->layers[layer].products[which];
}

/* out (+)= x @ weights, and what adapters add, for all spans: an item is a panel of a span. */
static void product_rows(const Pass *pass, Phase *phase, int64_t layer, enum Product which, Inputs x,
                         int add, float *out, int64_t out_stride) {
    const Batch *b = pass->batch;
    const int64_t panels = panels_of(matrix_of(b->spans->weights, layer, which));
    const int64_t items = panels * b->num_spans;
    int64_t grain = panels / (4 * pass->threads); /* few enough that all threads have work to the end */
    grain = grain < LONE_PANELS ? LONE_PANELS : grain / LONE_PANELS * LONE_PANELS;
    int64_t item, stop;
    while ((stop = claim(phase, items, grain, &item))) {
        const int64_t begin = item;
        while (item < stop) {
            const Span *span = b->spans + item / panels;
            const int64_t panel = item % panels, rows = span->stop - span->start;
            const int64_t count = stop - item < panels - panel ? stop - item : panels - panel;
            float *to = out + span->start * out_stride;
            product(matrix_of(span->weights, layer, which), from_row(x, span->start), rows, panel, count, add,
                    to, out_stride);
            if (which != HEAD)
                add_upper(pass, layer, which, pass->buffers.low, span->start, span->stop, panel, count, to,
                          out_stride);
            item += count;
        }
        finish(phase, stop - begin);
    }
    wait_for(phase, items);
}

/* inner = silu(x @ gate) * (x @ up): an item is a panel of both. */
static void gate_rows(const Pass *pass, Phase *phase, int64_t layer, Inputs normed, float *up) {
    const Batch *b = pass->batch;
    const Buffers *f = &pass->buffers;
    const int64_t panels = panels_of(matrix_of(b->spans->weights, layer, GATE));
    EACH(item, panels * b->num_spans, 1) {
        const Span *span = b->spans + item / panels;
        const int64_t panel = item % panels, rows = span->stop - span->start;
        const Inputs x = from_row(normed, span->start);
        float *gate = f->inner + span->start * f->inner_stride;
        float *up_out = up - panel * PANEL; /* `up` has this panel alone, for each row */
        product(matrix_of(span->weights, layer, GATE), x, rows, panel, 1, 0, gate, f->inner_stride);
        add_upper(pass, layer, GATE, f->low, span->start, span->stop, panel, 1, gate, f->inner_stride);
        product(matrix_of(span->weights, layer, UP), x, rows, panel, 1, 0, up_out, PANEL);
        add_upper(pass, layer, UP, f->low_of_up, span->start, span->stop, panel, 1, up_out, PANEL);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = r * f->inner_stride + panel * PANEL;
            gated(gate + at, up + r * PANEL);
            if (b->dots) narrow(gate + at, PANEL, f->narrow_inner + span->start * f->inner_stride + at);
        }
    }
    wait_for(phase, panels * b->num_spans);
}

/* Where key/value head k of a block begins in the pool. */
INLINE int64_t head_of_block(const Shape *s, int64_t layer, int64_t block, int64_t k) {
    return ((layer * s->num_blocks + block) * s->kv_heads + k) * s->width * s->block_tokens;
}

/* Queries and keys normed and turned in place, keys and values into the pool. */
static void cache_rows(const Pass *pass, Phase *phase, int64_t layer) {
    const Shape *s = pass->shape;
    const Batch *b = pass->batch;
    const int64_t turned = s->heads + s->kv_heads, D = s->width, T = s->block_tokens;
    const float scale = (float)(1.0 / sqrt((double)D));
    EACH(row, b->rows, 2) {
        const float *norms = weights_of(b, row)->layers[layer].qk_norm;
        float *heads = pass->buffers.heads + row * pass->buffers.heads_stride;
        const float *cosine = b->cosines + b->positions[row] * (D / 2);
        const float *sine = b->sines + b->positions[row] * (D / 2);
        for (int64_t h = 0; h < turned; h++) {
            float *head = heads + h * D;
            if (norms) normalise(head, norms + h * D, D, s->eps, head);
            rotate(head, cosine, sine, D, h < s->heads ? scale : 1.0f);
        }
        const int64_t block = b->places[row] / T, offset = b->places[row] % T;
        for (int64_t k = 0; k < s->kv_heads; k++) {
            const int64_t at = head_of_block(s, layer, block, k);
            const float *key = heads + (s->heads + k) * D, *value = heads + (turned + k) * D;
            for (int64_t d = 0; d < D; d++) {
                put_stored(s->keys, at + d * T + offset, s->kv_bf16, key[d]);
                put_stored(s->values, at + offset * D + d, s->kv_bf16, value[d]);
            }
        }
    }
    wait_for(phase, b->rows);
}

/* Blocks of one row, and how many tokens of them it reads. */
typedef struct {
    const int64_t *blocks;
    int64_t tokens;
} BlockRange;

/* The products of the queries of key/value head k with the keys of a stretch. */
static void score(const Shape *s, int64_t layer, int64_t k, BlockRange read, const float *q, float *scores,
                  int64_t stride) {
    const int64_t T = s->block_tokens;
    for (int64_t at = 0; at < read.tokens; at += T)
        block_product(s->heads / s->kv_heads, q, s->width, s->keys, head_of_block(s, layer, read.blocks[at / T], k),
                      T, s->kv_bf16, s->width, 0, scores + at, stride);
}

/* out += the values of a stretch, times their weights. */
static void add_values(const Shape *s, int64_t layer, int64_t k, BlockRange read, const float *weights,
                       int64_t stride, float *out) {
    const int64_t T = s->block_tokens;
    for (int64_t at = 0; at < read.tokens; at += T) {
        const int64_t fill = read.tokens - at < T ? read.tokens - at : T;
        block_product(s->heads / s->kv_heads, weights + at, stride, s->values,
                      head_of_block(s, layer, read.blocks[at / T], k), s->width, s->kv_bf16, fill, 1, out, s->width);
    }
}

/* An item is a key/value head of a row, with all the queries that read it. */
static void attend_rows(const Pass *pass, Phase *phase, int64_t layer, float *scores) {
    const Shape *s = pass->shape;
    const Batch *b = pass->batch;
    const Buffers *f = &pass->buffers;
    const int64_t group = s->heads / s->kv_heads, D = s->width, T = s->block_tokens, stride = b->longest;
    EACH(item, b->rows * s->kv_heads, 2) {
        const int64_t row = item / s->kv_heads, k = item % s->kv_heads, shared = b->shared[row];
        const int64_t *blocks = b->blocks + b->first[row];
        const BlockRange prompt = {blocks, shared}, own = {blocks + (shared + T - 1) / T, b->own[row]};
        const float *q = f->heads + row * f->heads_stride + k * group * D;
        float *out = f->attended + row * f->attended_stride + k * group * D;
        score(s, layer, k, prompt, q, scores, stride);
        score(s, layer, k, own, q, scores + shared, stride); /* over what lies behind the prompt's last token */
        float totals[group];
        for (int64_t g = 0; g < group; g++) totals[g] = exponentials(scores + g * stride, shared + own.tokens);
        memset(out, 0, group * D * sizeof *out);
        add_values(s, layer, k, prompt, scores, stride, out);
        add_values(s, layer, k, own, scores + shared, stride, out);
        for (int64_t g = 0; g < group; g++)
            for (int64_t d = 0; d < D; d++) out[g * D + d] /= totals[g];
        if (b->dots) narrow(out, group * D, f->narrow_attended + (out - f->attended));
    }
    wait_for(phase, b->rows * s->kv_heads);
}

static void run(const void *context, Phase *phase, int64_t thread) {
    const Pass *pass = context;
    const Shape *s = pass->shape;
    const Batch *b = pass->batch;
    const Buffers *f = &pass->buffers;
    float *scores = f->scratch + thread * f->scratch_size;
    float *up = scores + rounded(s->heads / s->kv_heads * b->longest);
    const int adapted = b->num_adapters > 0;
    const Inputs normed = {f->normed, f->narrow_normed, f->x_stride};
    const Inputs attended = {f->attended, f->narrow_attended, f->attended_stride};
    const Inputs inner = {f->inner, f->narrow_inner, f->inner_stride};
    embed(pass, phase++);
    for (int64_t l = 0; l < s->layers; l++) {
        normalise_rows(pass, phase++, l, ATTENTION_NORM);
        if (adapted) lower_rows(pass, phase++, l, QKV, normed, f->low);
        product_rows(pass, phase++, l, QKV, normed, 0, f->heads, f->heads_stride);
        cache_rows(pass, phase++, l);
        attend_rows(pass, phase++, l, scores);
        if (adapted) lower_rows(pass, phase++, l, OUT, attended, f->low);
        product_rows(pass, phase++, l, OUT, attended, 1, f->x, f->x_stride);
        normalise_rows(pass, phase++, l, MLP_NORM);
        if (adapted) {
            lower_rows(pass, phase++, l, GATE, normed, f->low);
            lower_rows(pass, phase++, l, UP, normed, f->low_of_up);
        }
        gate_rows(pass, phase++, l, normed, up);
        if (adapted) lower_rows(pass, phase++, l, DOWN, inner, f->low);
        product_rows(pass, phase++, l, DOWN, inner, 1, f->x, f->x_stride);
    }
    if (!b->logits) return;
    normalise_rows(pass, phase++, 0, LAST_NORM);
    product_rows(pass, phase++, 0, HEAD, normed, 0, b->logits, b->logits_stride);
}

enum { PHASES_OF_LAYER = 13, OTHER_PHASES = 3 };

/* What Python calls */

int64_t dora_panel(void) { return PANEL; }

int64_t dora_tile_rows(void) { return TILE_ROWS; }

int64_t dora_dots_in_hardware(void) { return DOTS_IN_HARDWARE; }

int64_t dora_workspace(const Shape *s, const Batch *b, int64_t threads) {
    Buffers unused;
    return lay_out(s, b, threads, (float *)0, &unused);
}

/* 0, or -1 for want of memory. The batch's workspace is for this number of threads. */
int dora_pass(const Shape *s, const Batch *b, int64_t threads) {
    Pass pass = {.shape = s, .batch = b, .threads = threads};
    lay_out(s, b, threads, b->workspace, &pass.buffers);
    return run_together(run, &pass, PHASES_OF_LAYER * s->layers + OTHER_PHASES, threads) ? 0 : -1;
}

typedef struct {
    const Matrix *matrix;
    const float *x;
    uint16_t *narrow; /* where the matrix is of DOTS: room for x in bf16 */
    int64_t x_stride, rows; /* there the stride is even */
    float *out;
    int64_t out_stride;
} LoneProduct;

static void run_product(const void *context, Phase *phase, int64_t thread) {
    const LoneProduct *p = context;
    const Inputs x = {p->x, p->narrow, p->x_stride};
    (void)thread;
    if (p->matrix->stored == DOTS) {
        EACH(row, p->rows, 1) narrow(p->x + row * p->x_stride, p->matrix->inputs, p->narrow + row * p->x_stride);
        wait_for(phase, p->rows);
    }
    phase++;
    EACH(panel, panels_of(p->matrix), LONE_PANELS)
    product(p->matrix, x, p->rows, panel, 1, 0, p->out, p->out_stride);
    wait_for(phase, panels_of(p->matrix));
}

/* One product by itself: out[R][out_stride] = x[R][x_stride] @ weights. */
int dora_product(const LoneProduct *p, int64_t threads) {
    return run_together(run_product, p, 2, threads) ? 0 : -1;
}

/* Weights [O][I] into panels, the last one filled up with zeros: numbers of fp32, or pairs of bf16. */
void dora_pack(const void *weights, int64_t bf16, int64_t outputs, int64_t inputs, void *panels) {
    const int64_t together = bf16 ? 2 : 1, filled = (inputs + together - 1) / together * together;
    for (int64_t o = 0; o < rounded(outputs); o++)
        for (int64_t i = 0; i < filled; i++) {
            const int64_t unit = (o / PANEL * filled + i) / together * PANEL + o % PANEL;
            const int64_t to = unit * together + i % together, from = o * inputs + i;
            const int there = o < outputs && i < inputs;
            if (bf16)
                ((uint16_t *)panels)[to] = there ? ((const uint16_t *)weights)[from] : 0;
            else
                ((float *)panels)[to] = there ? ((const float *)weights)[from] : 0;
        }
}
