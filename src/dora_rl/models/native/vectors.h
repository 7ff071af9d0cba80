/* Vectors of the widest registers at hand, numbers as they are stored, and e^x. */
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

/* As many sums as fit the registers of the instruction set: rows x vectors of a tile. */
#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 2
#define TILE_ROWS 12
#elif defined(__AVX2__)
#define LANES 8
#define VECTORS 2
#define TILE_ROWS 6
#elif defined(__aarch64__)
#define LANES 4
#define VECTORS 4
#define TILE_ROWS 6
#else
#define LANES 4
#define VECTORS 2
#define TILE_ROWS 6
#endif
#define PANEL (LANES * VECTORS)
#define LONE_PANELS 4 /* panels at a time for one row: its sums alone would wait for each other */

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

INLINE Vector splat(float x) {
    return x - (Vector){0};
}

INLINE Vector load(const float *at) {
    Vector v;
    memcpy(&v, at, sizeof v);
    return v;
}

INLINE void store(float *at, Vector v) { memcpy(at, &v, sizeof v); }

INLINE float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE Words load_words(const void *base, int64_t index) {
    Words w;
    memcpy(&w, (const uint32_t *)base + index, sizeof w);
    return w;
}

/* Of pairs of bf16, the first or the second ones. */
INLINE Vector one_of_pairs(Words pairs, int second) {
    return (Vector)(second ? pairs & 0xffff0000u : pairs << 16);
}

/* sum + x[0] * w[0] + x[1] * w[1], of pairs of bf16. */
#if defined(__AVX512BF16__)
#define DOTS_IN_HARDWARE 1
INLINE Vector add_dots(Vector sum, Words x, Words w) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
}
#else
#define DOTS_IN_HARDWARE 0
INLINE Vector add_dots(Vector sum, Words x, Words w) {
    sum += one_of_pairs(x, 0) * one_of_pairs(w, 0);
    return sum + one_of_pairs(x, 1) * one_of_pairs(w, 1);
}
#endif

INLINE Vector load_stored(const void *base, int64_t index, int bf16) {
    if (!bf16) return load((const float *)base + index);
    Halves half;
    memcpy(&half, (const uint16_t *)base + index, sizeof half);
    return (Vector)(__builtin_convertvector(half, Words) << 16);
}

INLINE float one_stored(const void *base, int64_t index, int bf16) {
    return bf16 ? widened(((const uint16_t *)base)[index]) : ((const float *)base)[index];
}

static uint16_t narrowed(float x) { /* to nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE Halves narrowed_vector(Vector x) { /* the same for each */
    Words bits = (Words)x, nan = (Words)(x != x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector((bits & ~nan) | (nan & 0x7fc0), Halves);
}

/* To bf16; an odd number of them is filled up with a zero. */
static void narrow(const float *x, int64_t count, uint16_t *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Halves half = narrowed_vector(load(x + i));
        memcpy(to + i, &half, sizeof half);
    }
    for (; i < count; i++) to[i] = narrowed(x[i]);
    if (count % 2) to[count] = 0;
}

INLINE void put_stored(void *base, int64_t index, int bf16, float x) {
    if (bf16)
        ((uint16_t *)base)[index] = narrowed(x);
    else
        ((float *)base)[index] = x;
}

/* a * b + c as the vectors' products are compiled: rounded once where the processor can. */
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* e^x to about one unit in the last place; as at -87 below that, infinite from 89 on, and NaN stays NaN. */
INLINE Vector exponential(Vector x) {
    const Vector lowest = splat(-87.0f), shift = splat(12582912.0f); /* 1.5 * 2^23 rounds to a whole number */
    const Vector highest = splat(89.0f); /* whose power is that of infinity */
    Integers low = x < lowest, high = x > highest;
    x = (Vector)(((Integers)lowest & low) | ((Integers)highest & high) | ((Integers)x & ~(low | high)));
    Vector turns = x * splat(1.44269504f) + shift;
    Integers power = ((Integers)turns - (Integers)shift + 127) << 23;
    turns = turns - shift;
    Vector rest = x - turns * splat(0.693145752f) - turns * splat(1.42860677e-6f);
    Vector sum = splat(1.98756915e-4f);
    sum = sum * rest + splat(1.39819995e-3f);
    sum = sum * rest + splat(8.33345190e-3f);
    sum = sum * rest + splat(4.16657959e-2f);
    sum = sum * rest + splat(1.66666655e-1f);
    sum = sum * rest + splat(5.00000001e-1f);
    sum = sum * rest * rest + rest + splat(1.0f);
    return sum * (Vector)power;
}
