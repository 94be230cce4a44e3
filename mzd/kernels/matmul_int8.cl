// Owns y = W x (or y += W x) for block-quantised weights and activations rounded to 8 bits: the fast path.
//
//   weights     packed (rows, cols), format by -DWEIGHT_*, one with blocks; cols a multiple of those, any rows
//   x           (tokens, cols) float; rounded here, in blocks of 32 with a float scale of max |x| / 127
//   y           (tokens, rows) float; nothing else is written
//   accumulator exact int within a block, float over the blocks
//   tolerance   max |dy| / max |y| <= 1e-2 against float64, 5e-6 against the same with x rounded first
//   work-group  one work-item: a lane of its vectors is a row, so the work-item is the SIMD unit
//
// Each work-group rounds the x that it needs into local memory. That repeats work, but a launch of its own
// (5-7 us on PoCL) would cost a quarter of a small matrix at one token, and a buffer to own.

#include "inputs.cl"
#include "places.cl"
#include "weights.cl"

#if VECTOR_BYTES == 64  // 32 registers of 16 lanes
#define TILE_TOKENS 8
#define UNROLL_TOKENS _Pragma("unroll 8")  // with the count, or clang leaves the loop to a later, timid pass
#else
#define TILE_TOKENS 4
#define UNROLL_TOKENS _Pragma("unroll 4")
#endif

#if VECTOR_BYTES == 16 && defined(__ARM_FEATURE_DOTPROD)
#define DOTS_OF_BYTES 1  // a lane's four bytes by four bytes in one instruction
#else
#define DOTS_OF_BYTES 0
#endif

typedef char bytes64 __attribute__((__vector_size__(64)));
typedef char bytes32 __attribute__((__vector_size__(32)));
typedef short shorts32 __attribute__((__vector_size__(64)));
typedef short shorts16 __attribute__((__vector_size__(32)));

#if STEP_WEIGHTS == 8 && (SCALE_BYTES == 0 || defined(WEIGHT_Q4_K))
#define SHORTS_HOLD_BLOCK 1  // 8 additions of 2 products of at most 15 x 127 are 30480
#else
#define SHORTS_HOLD_BLOCK 0  // of 63 x 127 only 2 additions are: 32004
#endif

// One step of weights, split so that `add_products` needs only multiplications.
//   Q4_0, Q4_1: first = bytes of the low nibbles, second = of the high ones
//   K types:    first = columns 0 to 3 as bytes, second = columns 4 to 7
//   Q8_0:       first = bytes 0 and 2 as shorts, second = bytes 1 and 3; with DOTS_OF_BYTES first = the bytes
typedef struct {
    uint16 first;
    uint16 second;
} StepWeights;

static inline StepWeights split_step(WeightPair pair, int block, int step) {
    StepWeights w;
#if SCALE_BYTES > 0
    w.first = load_quants(pair, block, 2 * step);
    w.second = load_quants(pair, block, 2 * step + 1);
#else
    const uint16 words = load_words(pair, block * BLOCK_STEPS + step);
#if STEP_WEIGHTS == 8
    w.first = words & 0x0f0f0f0fu;
    w.second = words >> 4 & 0x0f0f0f0fu;
#elif DOTS_OF_BYTES
    w.first = words;
    w.second = 0;
#else
    const shorts32 shorts = __builtin_astype(words, shorts32);
    w.first = __builtin_astype((shorts << 8) >> 8, uint16);
    w.second = __builtin_astype(shorts >> 8, uint16);
#endif
#endif
    return w;
}

// The rounded x of one step is two words: x_first meets `first`, x_second meets `second`.
#if SCALE_BYTES > 0
#define X_BYTES 1  // chars in order
#define X_FIRST(step) (2 * (step))
#define X_SECOND(step) (2 * (step) + 1)
#elif STEP_WEIGHTS == 8
#define X_BYTES 1  // chars in order; x_second lies four words behind x_first
#define X_FIRST(step) (step)
#define X_SECOND(step) ((step) + 4)
#elif DOTS_OF_BYTES
#define X_BYTES 1  // chars in order
#define X_FIRST(step) (step)
#define X_SECOND(step) (step)
#else
#define X_BYTES 2  // shorts in the order 0 2 1 3
#define X_FIRST(step) (2 * (step))
#define X_SECOND(step) (2 * (step) + 1)
#endif

#define SHORT_PAIR_SUMS(a, b) /* int lanes: a.lo * b.lo + a.hi * b.hi */ \
    ((as_int16((a) << 16) >> 16) * ((b) << 16 >> 16) + (as_int16(a) >> 16) * ((b) >> 16))
#define CHAR_PRODUCTS(a, b, j) (as_int16((a) >> (8 * (j)) & 255u) * ((b) << (24 - 8 * (j)) >> 24))

#if VECTOR_BYTES == 16

typedef int16 BlockSums;

#if DOTS_OF_BYTES
// By name, because compilers call the builtin differently. Weights are signed, or below 64.
static inline uint4 dots_of_bytes(uint4 sums, uint4 w, uint4 x) {
    __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(w), "w"(x));
    return sums;
}

static inline BlockSums add_dots(BlockSums sums, uint16 w, int x) {
    const uint16 before = as_uint16(sums);
    const uint4 x4 = (uint4)(as_uint(x));
    const uint4 s0 = dots_of_bytes(before.s0123, w.s0123, x4), s1 = dots_of_bytes(before.s4567, w.s4567, x4);
    const uint4 s2 = dots_of_bytes(before.s89ab, w.s89ab, x4), s3 = dots_of_bytes(before.scdef, w.scdef, x4);
    return as_int16((uint16)(s0, s1, s2, s3));
}
#endif

static inline BlockSums add_products(BlockSums sums, StepWeights w, int x_first, int x_second) {
#if DOTS_OF_BYTES
    sums = add_dots(sums, w.first, x_first);
    return STEP_WEIGHTS == 8 ? add_dots(sums, w.second, x_second) : sums;
#elif STEP_WEIGHTS == 8
    UNROLL for (int j = 0; j < 4; j++)
        sums += CHAR_PRODUCTS(w.first, x_first, j) + CHAR_PRODUCTS(w.second, x_second, j);
    return sums;
#else
    return sums + SHORT_PAIR_SUMS(w.first, x_first) + SHORT_PAIR_SUMS(w.second, x_second);
#endif
}

static inline int16 block_total(BlockSums sums) { return sums; }

#else

#if VECTOR_BYTES == 64
static inline int16 multiply_shorts(shorts32 a, shorts32 b) {
    return __builtin_astype(__builtin_ia32_pmaddwd512(a, b), int16);
}
static inline shorts32 multiply_bytes(bytes64 a, bytes64 b) { return __builtin_ia32_pmaddubsw512(a, b); }
#else
#define LOW_16 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define HIGH_16 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
static inline int16 multiply_shorts(shorts32 a, shorts32 b) {
    return (int16)(
        __builtin_astype(__builtin_ia32_pmaddwd256(__builtin_shufflevector(a, a, LOW_16),
                                                   __builtin_shufflevector(b, b, LOW_16)), int8),
        __builtin_astype(__builtin_ia32_pmaddwd256(__builtin_shufflevector(a, a, HIGH_16),
                                                   __builtin_shufflevector(b, b, HIGH_16)), int8));
}
static inline shorts32 multiply_bytes(bytes64 a, bytes64 b) {
    const uint16 a_words = __builtin_astype(a, uint16), b_words = __builtin_astype(b, uint16);
    const shorts16 low = __builtin_ia32_pmaddubsw256(__builtin_astype(a_words.lo, bytes32),
                                                     __builtin_astype(b_words.lo, bytes32));
    const shorts16 high = __builtin_ia32_pmaddubsw256(__builtin_astype(a_words.hi, bytes32),
                                                      __builtin_astype(b_words.hi, bytes32));
    return __builtin_shufflevector(low, high, LOW_16, HIGH_16);
}
#endif

#if STEP_WEIGHTS == 8

// Sums of pairs of products, as shorts.
static inline shorts32 step_products(StepWeights w, int x_first, int x_second) {
    return multiply_bytes(__builtin_astype(w.first, bytes64), __builtin_astype((int16)(x_first), bytes64)) +
           multiply_bytes(__builtin_astype(w.second, bytes64), __builtin_astype((int16)(x_second), bytes64));
}

static inline int16 add_pairs(shorts32 sums) {
    return multiply_shorts(sums, __builtin_astype((int16)(0x00010001), shorts32));
}

#endif

#if SHORTS_HOLD_BLOCK

typedef shorts32 BlockSums;

static inline BlockSums add_products(BlockSums sums, StepWeights w, int x_first, int x_second) {
    return sums + step_products(w, x_first, x_second);
}

static inline int16 block_total(BlockSums sums) { return add_pairs(sums); }

#else

typedef int16 BlockSums;

static inline BlockSums add_products(BlockSums sums, StepWeights w, int x_first, int x_second) {
#if STEP_WEIGHTS == 8
    return sums + add_pairs(step_products(w, x_first, x_second));
#else
    sums += multiply_shorts(__builtin_astype(w.first, shorts32),
                            __builtin_astype((int16)(x_first), shorts32));
    return sums + multiply_shorts(__builtin_astype(w.second, shorts32),
                                  __builtin_astype((int16)(x_second), shorts32));
#endif
}

static inline int16 block_total(BlockSums sums) { return sums; }

#endif
#endif

// One rounded token in local memory: words of x, then the scale of each block, then the scale * sum of each.
// All are 4-byte words; `RECORD_WORDS` of them. Where blocks are 16 weights two have the same scale.
#define BLOCK_WORDS (BLOCK_WEIGHTS * X_BYTES / 4)
#define RECORD_WORDS(blocks) ((blocks) * (BLOCK_WORDS + 2))

static inline int sum_lanes(int16 x) {
    const int8 eight = x.lo + x.hi;
    const int4 four = eight.lo + eight.hi;
    const int2 two = four.lo + four.hi;
    return two.x + two.y;
}

// Rounds 32 of x. Those with a NaN or an infinity get such a scale too, so that it shows in y.
// With fmax, rint and a vstore16 of chars, which PoCL emulates, a product of 8 x 576 by 192 took about
// 1.5 times as long: hence maxima of the bits, which order like the magnitudes, rounding by adding
// 1.5 * 2^23, and stores of whole words.
static inline void round_run(
    float16 low, float16 high, local int *words, local float *scales, local float *sums) {
    const int16 bits16 = max(as_int16(low) & INT_MAX, as_int16(high) & INT_MAX);
    const int8 bits8 = max(bits16.lo, bits16.hi);
    const int4 bits4 = max(bits8.lo, bits8.hi);
    const int2 bits2 = max(bits4.lo, bits4.hi);
    const float largest = as_float(max(bits2.x, bits2.y));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const float rounder = 12582912.0f;
    const int16 q_low = as_int16(fma(low, (float16)(inverse), (float16)(rounder))) - as_int(rounder);
    const int16 q_high = as_int16(fma(high, (float16)(inverse), (float16)(rounder))) - as_int(rounder);
    const float scale = largest * (1.0f / 127.0f);
    scales[0] = scale;
#if BLOCK_WEIGHTS == 16
    scales[1] = scale;
    sums[0] = scale * sum_lanes(q_low);
    sums[1] = scale * sum_lanes(q_high);
#else
    sums[0] = scale * sum_lanes(q_low + q_high);
#endif
#if X_BYTES == 1
    vstore4(as_int4(convert_char16(q_low)), 0, words);
    vstore4(as_int4(convert_char16(q_high)), 1, words);
#else
    vstore8(as_int8(convert_short16(q_low).s021346578a9bcedf), 0, words);
    vstore8(as_int8(convert_short16(q_high).s021346578a9bcedf), 1, words);
#endif
}

INLINED void round_token(Input input, local int *record, int blocks, const int kind) {
    local float *scales = (local float *)(record + blocks * BLOCK_WORDS);
    for (int block = 0; block < blocks; block += 32 / BLOCK_WEIGHTS) {
        const int column = block * BLOCK_WEIGHTS;
        round_run(load_inputs(input, column, kind), load_inputs(input, column + 16, kind),
                  record + block * BLOCK_WORDS, scales + block, scales + blocks + block);
    }
}

// One pair of row groups by up to `tile_tokens` rounded tokens; the constant is known after inlining.
static inline void multiply_pair(
    WeightPair pair, local const int *records, global float *y,
    int row, int rows, int blocks, int tokens, int accumulate, const int tile_tokens) {
    float16 results[TILE_TOKENS];
    local const int *words[TILE_TOKENS];
    UNROLL_TOKENS for (int t = 0; t < tile_tokens; t++) {
        results[t] = 0.0f;
        words[t] = records + min(t, tokens - 1) * RECORD_WORDS(blocks);  // past the end: the last again
    }
    for (int block = 0; block < blocks; block++) {
        BlockSums sums[TILE_TOKENS];
        UNROLL_TOKENS for (int t = 0; t < tile_tokens; t++) sums[t] = __builtin_astype((int16)(0), BlockSums);
        UNROLL for (int step = 0; step < BLOCK_STEPS; step++) {
            prefetch_step(pair, block, step);
            const StepWeights w = split_step(pair, block, step);
            UNROLL_TOKENS for (int t = 0; t < tile_tokens; t++) {
                local const int *x = words[t] + block * BLOCK_WORDS;
                sums[t] = add_products(sums[t], w, x[X_FIRST(step)], x[X_SECOND(step)]);
            }
        }
        const float16 scale = load_scale(pair, block);
        const float16 minimum = load_minimum(pair, block, scale);
        UNROLL_TOKENS for (int t = 0; t < tile_tokens; t++) {
            local const float *x_scales = (local const float *)(words[t] + blocks * BLOCK_WORDS) + block;
            results[t] = fma(convert_float16(block_total(sums[t])), scale * x_scales[0], results[t]);
#if HAS_MINIMUM
            results[t] = fma(minimum, (float16)(x_scales[blocks]), results[t]);
#endif
        }
    }
    UNROLL_TOKENS for (int t = 0; t < tile_tokens; t++)
        if (t < tokens) store_rows(results[t], y + (size_t)t * rows, row, rows, accumulate);
}

INLINED void multiply_token(
    global const uchar *weights, Input input, global float *y, int rows, int cols, int accumulate,
    local int *record, const int kind) {
    const int blocks = cols / BLOCK_WEIGHTS;
    const int last = first_pair(get_group_id(0) + 1, get_num_groups(0), rows);
    round_token(input, record, blocks, kind);
    for (int p = first_pair(get_group_id(0), get_num_groups(0), rows); p < last; p++)
        multiply_pair(weight_pair(weights, p, rows, cols), record, y, p * PAIR_ROWS, rows, blocks, 1,
                      accumulate, 1);
}

// global size: number of work-groups, any. record: RECORD_WORDS.
kernel WIDE_VECTORS ONE_WORK_ITEM void gemv_int8(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, local int *record PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    multiply_token(weights, (Input){x, x, 1.0f}, y, rows, cols, accumulate, record, PLAIN);
}

// The same of norm(x); norm: (cols,) float.
kernel WIDE_VECTORS ONE_WORK_ITEM void gemv_normed_int8(
    global const uchar *weights, global const float *x, global float *y, global const float *norm,
    int rows, int cols, int accumulate, local int *record, float eps PLACES4) {
    AT(weights, 0); AT(x, 1); AT(y, 2); AT(norm, 3);
    const Input input = {x, norm, norm_scale(x, cols, eps)};
    multiply_token(weights, input, y, rows, cols, accumulate, record, NORMED);
}

// The same of act(x) * up; up: (cols,) float.
kernel WIDE_VECTORS ONE_WORK_ITEM void gemv_gated_int8(
    global const uchar *weights, global const float *x, global float *y, global const float *up,
    int rows, int cols, int accumulate, local int *record PLACES4) {
    AT(weights, 0); AT(x, 1); AT(y, 2); AT(up, 3);
    multiply_token(weights, (Input){x, up, 1.0f}, y, rows, cols, accumulate, record, GATED);
}

// global size: (any number of work-groups that share the rows, token blocks of block_tokens).
// records: block_tokens times RECORD_WORDS.
kernel WIDE_VECTORS ONE_WORK_ITEM void matmul_int8(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, local int *records, int tokens, int block_tokens PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    const int blocks = cols / BLOCK_WEIGHTS;
    const int last = first_pair(get_group_id(0) + 1, get_num_groups(0), rows);
    const int first_token = get_group_id(1) * block_tokens;
    const int own_tokens = min(block_tokens, tokens - first_token);
    x += (size_t)first_token * cols;
    y += (size_t)first_token * rows;
    for (int t = 0; t < own_tokens; t++)
        round_token((Input){x + t * cols, x, 1.0f}, records + t * RECORD_WORDS(blocks), blocks, PLAIN);
    for (int p = first_pair(get_group_id(0), get_num_groups(0), rows); p < last; p++)
        for (int t = 0; t < own_tokens; t += TILE_TOKENS)
            multiply_pair(weight_pair(weights, p, rows, cols), records + t * RECORD_WORDS(blocks),
                          y + (size_t)t * rows, p * PAIR_ROWS, rows, blocks, own_tokens - t, accumulate,
                          TILE_TOKENS);
}
