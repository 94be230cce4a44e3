// Owns how kernels read packed weights (mzd/formats/weight_layout.py): 16 rows as the lanes of a float16.
//
// Build with one of -DWEIGHT_F32, _F16, _Q8_0, _Q4_0, _Q4_1. A matrix is groups of eight rows; two groups
// that follow each other form a pair and fill one vector. Where registers are 8 or 4 lanes wide the
// compiler splits it, which is then just several row groups in flight.
// With AVX-512 16 lanes took 0.64-0.81 of the time of 8 at one token; with the register tiles that they
// allow (matmul.cl) 0.64-0.72 at 8 tokens and half at 512.

#include "vector.cl"

#ifndef VECTOR_BYTES  // width of a register; tests choose narrower ones
#if defined(__AVX512BW__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif

#if VECTOR_BYTES == 64  // clang splits such vectors unless asked, since some CPUs slow down for them
#define WIDE_VECTORS __attribute__((min_vector_width(512)))
#else
#define WIDE_VECTORS
#endif

#if defined(WEIGHT_Q8_0)
#define HEADER_FIELDS 1
#define HAS_MINIMUM 0
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 4  // a step is one payload word of each row
#define WORD_BYTES 4
#elif defined(WEIGHT_Q4_0)
#define HEADER_FIELDS 1
#define HAS_MINIMUM 1  // -8 * scale
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 8
#define WORD_BYTES 4
#elif defined(WEIGHT_Q4_1)
#define HEADER_FIELDS 2
#define HAS_MINIMUM 1
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 8
#define WORD_BYTES 4
#elif defined(WEIGHT_F16)
#define HEADER_FIELDS 0
#define HAS_MINIMUM 0
#define BLOCK_WEIGHTS 1
#define STEP_WEIGHTS 1
#define WORD_BYTES 2
#elif defined(WEIGHT_F32)
#define HEADER_FIELDS 0
#define HAS_MINIMUM 0
#define BLOCK_WEIGHTS 1
#define STEP_WEIGHTS 1
#define WORD_BYTES 4
#endif

#define GROUP_ROWS 8
#define PAIR_ROWS 16
#define BLOCK_STEPS (BLOCK_WEIGHTS / STEP_WEIGHTS)
#define STEP_BYTES (GROUP_ROWS * WORD_BYTES)
#define HEADER_BYTES (GROUP_ROWS * HEADER_FIELDS * 2)  // of one block
#define ALIGN_64(bytes) (((bytes) + 63) & ~63)

// How far ahead of the reads: 1024 and 2048 were 1.2-1.8 times faster than none on Zen 3, 512 too near;
// level on Sapphire Rapids.
#define PREFETCH_BYTES 1024
#if defined(__x86_64__) || defined(__aarch64__)  // clang wants a private pointer, hence the cast
#define PREFETCH(pointer) __builtin_prefetch((const void *)((size_t)(pointer) + PREFETCH_BYTES))
#else
#define PREFETCH(pointer)
#endif

// A pair of row groups.
typedef struct {
    global const uchar *even;  // headers of the first group
    global const uchar *odd;   // of the second; the first again where the matrix has no more
    int payload_offset;        // from a group's headers to its payload
} WeightPair;

static inline int num_pairs(int rows) { return (rows + PAIR_ROWS - 1) / PAIR_ROWS; }

// Pairs [first_pair(g), first_pair(g + 1)) are those of work-group g; the groups share them evenly.
static inline int first_pair(int group, int groups, int rows) {
    return (int)((long)num_pairs(rows) * group / groups);
}

static inline WeightPair weight_pair(global const uchar *weights, int pair, int rows, int cols) {
    const int blocks = cols / BLOCK_WEIGHTS;
    const int payload_offset = ALIGN_64(blocks * HEADER_BYTES);
    const size_t group_bytes = payload_offset + ALIGN_64(blocks * BLOCK_STEPS * STEP_BYTES);
    WeightPair result;
    result.even = weights + 2 * pair * group_bytes;
    result.odd = (2 * pair + 1) * GROUP_ROWS < rows ? result.even + group_bytes : result.even;
    result.payload_offset = payload_offset;
    return result;
}

static inline float16 load_halves(global const uchar *even, global const uchar *odd) {
    return (float16)(vload_half8(0, (global const half *)even), vload_half8(0, (global const half *)odd));
}

static inline uint16 load_words(global const uchar *even, global const uchar *odd) {
    return (uint16)(vload8(0, (global const uint *)even), vload8(0, (global const uint *)odd));
}

// The weights of a block are scale * w + minimum, w as `load_step` gives it.
static inline float16 load_scale(WeightPair pair, int block) {
#if HEADER_FIELDS > 0
    const int offset = block * HEADER_BYTES;
    return load_halves(pair.even + offset, pair.odd + offset);
#else
    return 1.0f;
#endif
}

static inline float16 load_minimum(WeightPair pair, int block, float16 scale) {
#if HEADER_FIELDS > 1
    const int offset = block * HEADER_BYTES + GROUP_ROWS * 2;
    return load_halves(pair.even + offset, pair.odd + offset);
#else
    return -8.0f * scale;
#endif
}

// Column, inside its block, of a step's weight j: of a 4-bit byte the low nibble is column i, the high
// one column 16 + i.
static inline int step_column(int step, int j) { return 4 * step + (j & 3) + 16 * (j >> 2); }

// Reads the payload words of one step, of 16 rows; F16 has half words and no use for this.
static inline uint16 load_step_words(WeightPair pair, int block, int step) {
    const int offset = pair.payload_offset + (block * BLOCK_STEPS + step) * STEP_BYTES;
    return load_words(pair.even + offset, pair.odd + offset);
}

// Asks for the payload of a step PREFETCH_BYTES ahead, once a cache line.
static inline void prefetch_step(WeightPair pair, int block, int step) {
    const int offset = pair.payload_offset + (block * BLOCK_STEPS + step) * STEP_BYTES;
    if (step % 2 == 0) {
        PREFETCH(pair.even + offset);
        PREFETCH(pair.odd + offset);
    }
}

// Unscaled weights of one step: w[j] holds column step_column(step, j) for 16 rows.
static inline void load_step(WeightPair pair, int block, int step, float16 *w) {
    prefetch_step(pair, block, step);
#if defined(WEIGHT_F32)
    w[0] = as_float16(load_step_words(pair, block, step));
#elif defined(WEIGHT_F16)
    const int offset = pair.payload_offset + block * STEP_BYTES;
    w[0] = load_halves(pair.even + offset, pair.odd + offset);
#else
    const uint16 words = load_step_words(pair, block, step);
    UNROLL for (int j = 0; j < STEP_WEIGHTS; j++) {
#if STEP_WEIGHTS == 4
        w[j] = convert_float16(as_int16(words << (24 - 8 * j)) >> 24);
#else
        w[j] = convert_float16(as_int16(words >> (8 * (j & 3) + 4 * (j >> 2)) & 15u));
#endif
    }
#endif
}

static inline float16 scaled(float16 w, float16 scale, float16 minimum) {
#if HAS_MINIMUM
    return fma(w, scale, minimum);
#elif HEADER_FIELDS > 0
    return w * scale;
#else
    return w;
#endif
}

// Writes the results of rows row .. row + 15 of one token, those that the matrix has; or adds them.
static inline void store_rows(float16 result, global float *y, int row, int rows, int accumulate) {
    if (row + PAIR_ROWS <= rows) {
        vstore16(accumulate ? result + vload16(0, y + row) : result, 0, y + row);
        return;
    }
    float lanes[PAIR_ROWS];
    vstore16(result, 0, lanes);
    for (int lane = 0; row + lane < rows; lane++)
        y[row + lane] = accumulate ? y[row + lane] + lanes[lane] : lanes[lane];
}
