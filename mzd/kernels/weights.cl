// Owns how kernels read packed weights (mzd/formats/weight_layout.py): 16 rows as the lanes of a float16.
//
// Two row groups that follow each other form a pair and fill one vector. Where registers are 8 or 4 lanes wide
// the compiler splits it, which is then just several row groups in flight.
// With AVX-512 16 lanes took 0.64-0.81 of the time of 8 at one token; with the register tiles that they
// allow (matmul.cl) 0.64-0.72 at 8 tokens and half at 512.

#include "vector.cl"
#include "weight_format.cl"

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

#define PAIR_ROWS 16

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
    WeightPair result;
    result.even = weights + 2 * pair * group_bytes(cols);
    result.odd = (2 * pair + 1) * GROUP_ROWS < rows ? result.even + group_bytes(cols) : result.even;
    result.payload_offset = payload_offset(cols);
    return result;
}

static inline float16 load_halves(WeightPair pair, int offset) {
    return (float16)(vload_half8(0, (global const half *)(pair.even + offset)),
                     vload_half8(0, (global const half *)(pair.odd + offset)));
}

// The words `index` of the payload.
static inline uint16 load_words(WeightPair pair, int index) {
    const int offset = pair.payload_offset + index * (GROUP_ROWS * 4);
    return (uint16)(vload8(0, (global const uint *)(pair.even + offset)),
                    vload8(0, (global const uint *)(pair.odd + offset)));
}

// The scales `index` of the blocks under one header; as longs because a vload8 of bytes loads each by itself.
static inline ulong2 load_scale_bytes(WeightPair pair, int header, int index) {
    const int offset = header * HEADER_BYTES + GROUP_ROWS * (2 * HEADER_FIELDS + index);
    return (ulong2)(*(global const ulong *)(pair.even + offset), *(global const ulong *)(pair.odd + offset));
}

// The weights of a block are scale * w + minimum, w as `load_step` gives it.
static inline float16 load_scale(WeightPair pair, int block) {
#if HEADER_FIELDS == 0
    return 1.0f;
#elif SCALE_BYTES == 0
    return load_halves(pair, block * HEADER_BYTES);
#else
    const int header = block / SUPER_BLOCKS, index = block % SUPER_BLOCKS;
    const float16 scale = load_halves(pair, header * HEADER_BYTES);
#if defined(WEIGHT_Q6_K)
    return scale * convert_float16(as_char16(load_scale_bytes(pair, header, index)));
#else
    return scale * convert_float16(as_uchar16(load_scale_bytes(pair, header, 2 * index)));
#endif
#endif
}

static inline float16 load_minimum(WeightPair pair, int block, float16 scale) {
#if defined(MINIMUM_SCALES)
    return MINIMUM_SCALES * scale;
#elif HEADER_FIELDS < 2
    return 0.0f;
#elif SCALE_BYTES == 0
    return load_halves(pair, block * HEADER_BYTES + GROUP_ROWS * 2);
#else
    const int header = block / SUPER_BLOCKS, index = block % SUPER_BLOCKS;
    const float16 minimum = load_halves(pair, header * HEADER_BYTES + GROUP_ROWS * 2);
    return -minimum * convert_float16(as_uchar16(load_scale_bytes(pair, header, 2 * index + 1)));
#endif
}

// Column, inside its block, of a step's weight j: of a byte of Q4_0 and Q4_1 the low nibble is column i, the
// high one column 16 + i. The K types keep 32 columns or more apart; a step there has one half of its bytes.
static inline int step_column(int step, int j) {
#if SCALE_BYTES > 0
    return 8 * step + j;
#else
    return 4 * step + (j & 3) + 16 * (j >> 2);
#endif
}

#if SCALE_BYTES > 0
// Four weights of a K type as the bytes of a word: columns 4 * word .. 4 * word + 3 of a block, 16 rows.
// A byte of the payload serves several blocks, which lie apart; so some words are read more than once, out of
// the nearest cache.
static inline uint16 load_quants(WeightPair pair, int block, int word) {
#if defined(WEIGHT_Q4_K)
    const int base = block / SUPER_BLOCKS * SUPER_WORDS, run = block % SUPER_BLOCKS;
    return load_words(pair, base + run / 2 * 8 + word) >> (uint)(run % 2 * 4) & 0x0f0f0f0fu;
#elif defined(WEIGHT_Q5_K)
    const int base = block / SUPER_BLOCKS * SUPER_WORDS, run = block % SUPER_BLOCKS;
    const uint16 low = load_words(pair, base + 8 + run / 2 * 8 + word) >> (uint)(run % 2 * 4);
    const uint16 high = load_words(pair, base + word) >> (uint)run;
    return (low & 0x0f0f0f0fu) | (high & 0x01010101u) << 4;
#else
    const int base = block / (SUPER_BLOCKS / 2) * (SUPER_WORDS / 2);  // of half a super-block
    const int run = block % (SUPER_BLOCKS / 2) / 2, place = block % 2 * 4 + word;  // 32 columns are a run
    const uint16 low = load_words(pair, base + run % 2 * 8 + place) >> (uint)(run / 2 * 4);
    const uint16 high = load_words(pair, base + 16 + place) >> (uint)(run * 2);
    return (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
#endif
}
#endif

// Asks for the payload of a step PREFETCH_BYTES ahead, once a cache line.
static inline void prefetch_step(WeightPair pair, int block, int step) {
    const int offset = pair.payload_offset + (block * BLOCK_STEPS + step) * STEP_BYTES;
    if (STEP_BYTES > 32 || step % 2 == 0) {
        PREFETCH(pair.even + offset);
        PREFETCH(pair.odd + offset);
    }
}

// Unscaled weights of one step: w[j] holds column step_column(step, j) for 16 rows.
static inline void load_step(WeightPair pair, int block, int step, float16 *w) {
    prefetch_step(pair, block, step);
#if defined(WEIGHT_F16)
    w[0] = load_halves(pair, pair.payload_offset + block * STEP_BYTES);
#elif defined(WEIGHT_BF16)
    const int offset = pair.payload_offset + block * STEP_BYTES;
    const ushort16 bits = (ushort16)(vload8(0, (global const ushort *)(pair.even + offset)),
                                     vload8(0, (global const ushort *)(pair.odd + offset)));
    w[0] = as_float16(convert_uint16(bits) << 16);
#elif SCALE_BYTES > 0
    UNROLL for (int word = 0; word < 2; word++) {
        const uint16 quants = load_quants(pair, block, 2 * step + word);
        UNROLL for (int j = 0; j < 4; j++)
            w[4 * word + j] = convert_float16(as_int16(quants >> (uint)(8 * j) & 255u));
    }
#else
    const uint16 words = load_words(pair, block * BLOCK_STEPS + step);
#if STEP_WEIGHTS == 1
    w[0] = as_float16(words);
#else
    UNROLL for (int j = 0; j < STEP_WEIGHTS; j++) {
#if STEP_WEIGHTS == 4
        w[j] = convert_float16(as_int16(words << (24 - 8 * j)) >> 24);
#else
        w[j] = convert_float16(as_int16(words >> (8 * (j & 3) + 4 * (j >> 2)) & 15u));
#endif
    }
#endif
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
