/* Causal attention with rotary positions over packed rows.
 *
 * A group is one or more segments. The first has its own rows alone; each of the others sees the first `prefix` rows
 * of the group, too. Keys and values of a segment stand together as [prefix, own rows], in a thread's scratch, and
 * the prefix stays there from one segment to the next, as do its gradients.
 */

typedef struct {
    const void *q, *k, *v;   /* [rows, heads, size], [rows, kv_heads, size] twice, before rotation */
    const float *cos, *sin;  /* [rows, size / 2] */
    void *out;               /* [rows, heads, size] */
    float *normaliser;       /* [rows, heads]: log of the sum of e^score */
    const void *grad_out;
    void *grad_q, *grad_k, *grad_v;
    const int64_t *groups;   /* [num_groups + 1]: the first segment of each */
    const int64_t *segments; /* [segments + 1]: the first row of each */
    const int64_t *prefixes; /* [num_groups] */
    int64_t num_groups, heads, kv_heads, size;
    int64_t most_keys; /* of any segment, its prefix included */
    float scale;
    int bf16;
    atomic_int failed; /* for want of memory */
} Attention;

/* A thread's memory. `wide` is the head size, `long_` the most keys, both up to whole vectors. */
typedef struct {
    int64_t wide, long_;
    float *keys, *values, *grad_keys, *grad_values; /* [long_, wide] */
    float *keys_t, *values_t;                       /* [wide, long_] */
    float *queries, *rows, *grad_queries;           /* [QUERIES, wide] */
    float *probs, *grads;                           /* [QUERIES, long_] */
    float *all;
} Scratch;

static int open_scratch(Scratch *s, const Attention *a) {
    s->wide = whole(a->size, LANES);
    s->long_ = whole(a->most_keys, LANES);
    const int64_t plane = s->wide * s->long_, block = QUERIES * s->wide, scores = QUERIES * s->long_;
    float *at = s->all = calloc(6 * plane + 3 * block + 2 * scores, sizeof *at);
    if (!at) return 0;
    float **planes[] = {&s->keys, &s->values, &s->grad_keys, &s->grad_values, &s->keys_t, &s->values_t};
    for (int i = 0; i < 6; i++, at += plane) *planes[i] = at;
    float **blocks[] = {&s->queries, &s->rows, &s->grad_queries};
    for (int i = 0; i < 3; i++, at += block) *blocks[i] = at;
    s->probs = at;
    s->grads = at + scores;
    return 1;
}

/* c = a b (+ c): a[r][k] at a[r * ar + k * ak], b and c by rows, `vectors` of them wide. */
INLINE void strip(const float *a, int64_t ar, int64_t ak, const float *b, int64_t ldb, float *c, int64_t ldc,
                  int64_t depth, int rows, int vectors, int add) {
    Vector sums[STRIP][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = add ? load(c + r * ldc + v * LANES) : splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vector line[2];
        for (int v = 0; v < vectors; v++) line[v] = load(b + k * ldb + v * LANES);
        for (int r = 0; r < rows; r++) {
            const Vector x = splat(a[r * ar + k * ak]);
            for (int v = 0; v < vectors; v++) sums[r][v] += x * line[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(c + r * ldc + v * LANES, sums[r][v]);
}

INLINE void strips(const float *a, int64_t ar, int64_t ak, const float *b, int64_t ldb, float *c, int64_t ldc,
                   int64_t rows, int64_t depth, int vectors, int add) {
    int64_t r = 0;
    for (; r + STRIP <= rows; r += STRIP)
        strip(a + r * ar, ar, ak, b, ldb, c + r * ldc, ldc, depth, STRIP, vectors, add);
    for (; r + STRIP / 2 <= rows; r += STRIP / 2)
        strip(a + r * ar, ar, ak, b, ldb, c + r * ldc, ldc, depth, STRIP / 2, vectors, add);
    for (; r < rows; r++) strip(a + r * ar, ar, ak, b, ldb, c + r * ldc, ldc, depth, 1, vectors, add);
}

static void product(const float *a, int64_t ar, int64_t ak, const float *b, int64_t ldb, float *c, int64_t ldc,
                    int64_t rows, int64_t depth, int64_t columns, int add) {
    int64_t n = 0;
    for (; n + 2 * LANES <= columns; n += 2 * LANES) strips(a, ar, ak, b + n, ldb, c + n, ldc, rows, depth, 2, add);
    if (n < columns) strips(a, ar, ak, b + n, ldb, c + n, ldc, rows, depth, 1, add);
}

/* One head's numbers of a row to scratch, times `scale`, and back; `turn` rotates it, or rotates it back. */
INLINE void fetch(const void *base, int64_t index, int64_t size, int bf16, float scale, float *to) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        const Vector x = get(base, index + i, bf16, left) * splat(scale);
        if (left >= LANES)
            store(to + i, x);
        else
            store_rest(to, i, 0, left, x);
    }
}

INLINE void deliver(const float *from, float scale, void *base, int64_t index, int64_t size, int bf16) {
    for (int64_t i = 0; i < size; i += LANES)
        put(base, index + i, bf16, size - i, get(from, i, 0, size - i) * splat(scale));
}

INLINE void turn(const Attention *a, int64_t row, float way, float *x) {
    const int64_t half = a->size / 2;
    const float *cos = a->cos + row * half, *sin = a->sin + row * half;
    for (int64_t i = 0; i < half; i++) {
        const float low = x[i], high = x[i + half], side = way * sin[i];
        x[i] = low * cos[i] - high * side;
        x[i + half] = high * cos[i] + low * side;
    }
}

/* Keys and values of a segment's own rows, behind the prefix, and transposed. */
static void take_keys(const Attention *a, Scratch *s, int64_t head, int64_t begin, int64_t end, int64_t prefix) {
    for (int64_t row = begin; row < end; row++) {
        const int64_t place = prefix + row - begin, at = (row * a->kv_heads + head) * a->size;
        float *key = s->keys + place * s->wide, *value = s->values + place * s->wide;
        fetch(a->k, at, a->size, a->bf16, 1, key);
        fetch(a->v, at, a->size, a->bf16, 1, value);
        turn(a, row, 1, key);
    }
    const int64_t last = prefix + end - begin;
    for (int64_t i = 0; i < a->size; i++)
        for (int64_t place = prefix; place < last; place++) {
            s->keys_t[i * s->long_ + place] = s->keys[place * s->wide + i];
            s->values_t[i * s->long_ + place] = s->values[place * s->wide + i];
        }
}

/* Scaled scores of up to QUERIES rows of one head with all keys that the last of them sees. */
static void score(const Attention *a, Scratch *s, int64_t head, int64_t first, int64_t count, int64_t keys) {
    for (int64_t r = 0; r < count; r++) {
        float *query = s->queries + r * s->wide;
        fetch(a->q, ((first + r) * a->heads + head) * a->size, a->size, a->bf16, a->scale, query);
        turn(a, first + r, 1, query);
    }
    product(s->queries, s->wide, 1, s->keys_t, s->long_, s->probs, s->long_, count, a->size, whole(keys, LANES), 0);
}

/* e^(score - highest) of the keys that a row sees, 0 for the others; their sum. */
INLINE float softmax_weights(float *scores, int64_t seen, int64_t keys, float highest) {
    const int64_t end = whole(keys, LANES);
    Vector sum = splat(0);
    for (int64_t j = seen; j < end; j++) scores[j] = -INFINITY;
    for (int64_t j = 0; j < end; j += LANES) {
        Vector e = exponential(load(scores + j) - splat(highest));
        if (j + LANES > seen) { /* the least that `exponential` gives is not 0 */
            float part[LANES];
            store(part, e);
            for (int64_t i = seen > j ? seen - j : 0; i < LANES; i++) part[i] = 0;
            e = load(part);
        }
        store(scores + j, e);
        sum += e;
    }
    return total(sum);
}

INLINE float highest_of(const float *scores, int64_t seen) {
    float highest = scores[0];
    for (int64_t j = 1; j < seen; j++) highest = scores[j] > highest ? scores[j] : highest;
    return highest;
}

static void attend_segment(const Attention *a, Scratch *s, int64_t kv, int64_t begin, int64_t end, int64_t prefix) {
    const int64_t repeat = a->heads / a->kv_heads;
    take_keys(a, s, kv, begin, end, prefix);
    for (int64_t head = kv * repeat; head < (kv + 1) * repeat; head++)
        for (int64_t first = begin; first < end; first += QUERIES) {
            const int64_t count = least(QUERIES, end - first), keys = prefix + first + count - begin;
            score(a, s, head, first, count, keys);
            for (int64_t r = 0; r < count; r++) {
                float *scores = s->probs + r * s->long_;
                const int64_t seen = keys - count + r + 1;
                const float highest = highest_of(scores, seen), sum = softmax_weights(scores, seen, keys, highest);
                a->normaliser[(first + r) * a->heads + head] = highest + logf(sum);
                s->grads[r] = 1.0f / sum;
            }
            product(s->probs, s->long_, 1, s->values, s->wide, s->rows, s->wide, count, keys, s->wide, 0);
            for (int64_t r = 0; r < count; r++) {
                const int64_t at = ((first + r) * a->heads + head) * a->size;
                deliver(s->rows + r * s->wide, s->grads[r], a->out, at, a->size, a->bf16);
            }
        }
}

static void attend_group(const Attention *a, Scratch *s, int64_t group, int64_t kv) {
    for (int64_t i = a->groups[group]; i < a->groups[group + 1]; i++) {
        const int64_t prefix = i > a->groups[group] ? a->prefixes[group] : 0;
        attend_segment(a, s, kv, a->segments[i], a->segments[i + 1], prefix);
    }
}

/* Gradients of the scores of a block, in `grads`, from those of its outputs; `probs` are made again. */
static void score_back(const Attention *a, Scratch *s, int64_t head, int64_t first, int64_t count, int64_t keys) {
    float inner[QUERIES];
    score(a, s, head, first, count, keys);
    for (int64_t r = 0; r < count; r++) {
        const int64_t at = ((first + r) * a->heads + head) * a->size;
        float *back = s->rows + r * s->wide;
        fetch(a->grad_out, at, a->size, a->bf16, 1, back);
        Vector sum = splat(0);
        for (int64_t i = 0; i < a->size; i += LANES) {
            const int64_t left = a->size - i;
            sum += get(back, i, 0, left) * get(a->out, at + i, a->bf16, left);
        }
        inner[r] = total(sum);
        softmax_weights(s->probs + r * s->long_, keys - count + r + 1, keys, a->normaliser[(first + r) * a->heads + head]);
    }
    const int64_t columns = whole(keys, LANES);
    product(s->rows, s->wide, 1, s->values_t, s->long_, s->grads, s->long_, count, a->size, columns, 0);
    for (int64_t r = 0; r < count; r++)
        for (int64_t j = r * s->long_; j < r * s->long_ + columns; j += LANES)
            store(s->grads + j, load(s->probs + j) * (load(s->grads + j) - splat(inner[r])));
}

static void attend_segment_back(const Attention *a, Scratch *s, int64_t kv, int64_t begin, int64_t end,
                                int64_t prefix) {
    const int64_t repeat = a->heads / a->kv_heads;
    take_keys(a, s, kv, begin, end, prefix);
    memset(s->grad_keys + prefix * s->wide, 0, (end - begin) * s->wide * sizeof(float));
    memset(s->grad_values + prefix * s->wide, 0, (end - begin) * s->wide * sizeof(float));
    for (int64_t head = kv * repeat; head < (kv + 1) * repeat; head++)
        for (int64_t first = begin; first < end; first += QUERIES) {
            const int64_t count = least(QUERIES, end - first), keys = prefix + first + count - begin;
            score_back(a, s, head, first, count, keys);
            product(s->probs, 1, s->long_, s->rows, s->wide, s->grad_values, s->wide, keys, count, s->wide, 1);
            product(s->grads, 1, s->long_, s->queries, s->wide, s->grad_keys, s->wide, keys, count, s->wide, 1);
            product(s->grads, s->long_, 1, s->keys, s->wide, s->grad_queries, s->wide, count, keys, s->wide, 0);
            for (int64_t r = 0; r < count; r++) {
                float *grad = s->grad_queries + r * s->wide;
                turn(a, first + r, -1, grad);
                const int64_t at = ((first + r) * a->heads + head) * a->size;
                deliver(grad, a->scale, a->grad_q, at, a->size, a->bf16);
            }
        }
}

static void deliver_keys_back(const Attention *a, Scratch *s, int64_t kv, int64_t begin, int64_t end, int64_t place) {
    for (int64_t row = begin; row < end; row++, place++) {
        const int64_t at = (row * a->kv_heads + kv) * a->size;
        turn(a, row, -1, s->grad_keys + place * s->wide);
        deliver(s->grad_keys + place * s->wide, 1, a->grad_k, at, a->size, a->bf16);
        deliver(s->grad_values + place * s->wide, 1, a->grad_v, at, a->size, a->bf16);
    }
}

static void attend_group_back(const Attention *a, Scratch *s, int64_t group, int64_t kv) {
    const int64_t start = a->groups[group], begin = a->segments[start], common = a->prefixes[group];
    for (int64_t i = start; i < a->groups[group + 1]; i++) {
        const int64_t prefix = i > start ? common : 0;
        attend_segment_back(a, s, kv, a->segments[i], a->segments[i + 1], prefix);
        /* Rows of the prefix are delivered last: later segments add to their gradients. */
        const int64_t own = i > start ? 0 : common;
        deliver_keys_back(a, s, kv, a->segments[i] + own, a->segments[i + 1], prefix + own);
    }
    deliver_keys_back(a, s, kv, begin, begin + common, 0);
}

typedef struct {
    Attention *attention;
    void (*each)(const Attention *, Scratch *, int64_t group, int64_t kv);
} Call;

static void attend_items(const void *given, Phase *phase, int64_t thread) {
    const Call *call = given;
    Attention *a = call->attention;
    Scratch scratch;
    (void)thread;
    if (!open_scratch(&scratch, a)) {
        atomic_store(&a->failed, 1);
        return;
    }
    EACH(item, a->num_groups * a->kv_heads, 1) { call->each(a, &scratch, item / a->kv_heads, item % a->kv_heads); }
    free(scratch.all);
}

static int attend(Attention *a, int64_t threads,
                  void (*each)(const Attention *, Scratch *, int64_t group, int64_t kv)) {
    const Call call = {a, each};
    atomic_store(&a->failed, 0);
    return run_together(attend_items, &call, 1, least(threads, a->num_groups * a->kv_heads)) &&
           !atomic_load(&a->failed);
}
