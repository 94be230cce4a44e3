// Owns the format of packed weights as constants (mzd/formats/weight_layout.py), for kernels of every class.
//
// Build with one of -DWEIGHT_F32, _F16, _BF16, _Q8_0, _Q4_0, _Q4_1, _Q4_K, _Q5_K, _Q6_K. A matrix is groups of
// eight rows: the headers of a group's blocks, then its payload.

// A block is the weights of a row that share a scale. In the K types 256 weights share the halves of a header,
// which each block multiplies by bytes of its own.
#if defined(WEIGHT_Q8_0)
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 4   // a step is one payload word of each row
#define HEADER_FIELDS 1
#elif defined(WEIGHT_Q4_0)
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 8
#define HEADER_FIELDS 1
#define MINIMUM_SCALES -8.0f
#elif defined(WEIGHT_Q4_1)
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 8
#define HEADER_FIELDS 2
#elif defined(WEIGHT_Q4_K)
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 8   // of the K types: 8 columns, for which several words are read
#define HEADER_FIELDS 2
#define SUPER_WORDS 32
#elif defined(WEIGHT_Q5_K)
#define BLOCK_WEIGHTS 32
#define STEP_WEIGHTS 8
#define HEADER_FIELDS 2
#define SUPER_WORDS 40
#elif defined(WEIGHT_Q6_K)
#define BLOCK_WEIGHTS 16
#define STEP_WEIGHTS 8
#define HEADER_FIELDS 1
#define SUPER_WORDS 48
#define MINIMUM_SCALES -32.0f
#else  // F16, BF16, F32
#define BLOCK_WEIGHTS 1
#define STEP_WEIGHTS 1
#define HEADER_FIELDS 0
#endif

#if defined(WEIGHT_F16) || defined(WEIGHT_BF16)
#define WORD_BYTES 2
#else
#define WORD_BYTES 4
#endif

#ifdef SUPER_WORDS  // payload words of a row for 256 weights
#define SUPER_BLOCKS (256 / BLOCK_WEIGHTS)
#define SCALE_BYTES 16
#else
#define SUPER_BLOCKS 1
#define SCALE_BYTES 0
#define SUPER_WORDS BLOCK_STEPS
#endif

#if HEADER_FIELDS > 1 || defined(MINIMUM_SCALES)
#define HAS_MINIMUM 1
#else
#define HAS_MINIMUM 0
#endif

#define GROUP_ROWS 8
#define BLOCK_STEPS (BLOCK_WEIGHTS / STEP_WEIGHTS)
#define STEP_BYTES (GROUP_ROWS * WORD_BYTES * SUPER_WORDS / (SUPER_BLOCKS * BLOCK_STEPS))
#define HEADER_BYTES (GROUP_ROWS * (2 * HEADER_FIELDS + SCALE_BYTES))  // of SUPER_BLOCKS blocks
#define ALIGN_64(bytes) (((bytes) + 63) & ~63)

// Bytes from a group's headers to its payload.
static inline int payload_offset(int cols) {
    return ALIGN_64(cols / BLOCK_WEIGHTS / SUPER_BLOCKS * HEADER_BYTES);
}

// Bytes of a group, and the distance to the next one.
static inline size_t group_bytes(int cols) {
    return payload_offset(cols) + ALIGN_64(cols / STEP_WEIGHTS * STEP_BYTES);
}
