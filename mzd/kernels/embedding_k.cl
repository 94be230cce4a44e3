// Owns how `embed` (embedding.cl) expands a row of a K type: -DTYPE_Q4_K, _Q5_K or _Q6_K.
//
// The layout is that of mzd/formats/weight_layout.py: under a header of 256 weights, runs of 32 columns. A
// run's word holds four columns in its bytes.

#define SUPER_WEIGHTS 256
#define RUN_WEIGHTS 32

#if defined(TYPE_Q6_K)
#define HEADER_FIELDS 1
#define SUPER_WORDS 48
#elif defined(TYPE_Q5_K)
#define HEADER_FIELDS 2
#define SUPER_WORDS 40
#else
#define HEADER_FIELDS 2
#define SUPER_WORDS 32
#endif
#define SUPER_HEADER_BYTES (ROWS_PER_GROUP * (2 * HEADER_FIELDS + 16))

// The quants of four columns of a run; `words` are this row's, of 256 weights.
static inline float4 run_quants(global const uint* words, int run, int word) {
#if defined(TYPE_Q6_K)
    words += run / 4 * (SUPER_WORDS / 2) * ROWS_PER_GROUP;  // half of the 256
    const uint low = words[(run % 2 * 8 + word) * ROWS_PER_GROUP] >> (run % 4 / 2 * 4) & 0x0f0f0f0fu;
    const uint high = words[(16 + word) * ROWS_PER_GROUP] >> (run % 4 * 2) & 0x03030303u;
    return convert_float4(as_uchar4(low | high << 4)) - 32.0f;
#elif defined(TYPE_Q5_K)
    const uint low = words[(8 + run / 2 * 8 + word) * ROWS_PER_GROUP] >> (run % 2 * 4) & 0x0f0f0f0fu;
    const uint high = words[word * ROWS_PER_GROUP] >> run & 0x01010101u;
    return convert_float4(as_uchar4(low | high << 4));
#else
    const uint low = words[(run / 2 * 8 + word) * ROWS_PER_GROUP] >> (run % 2 * 4) & 0x0f0f0f0fu;
    return convert_float4(as_uchar4(low));
#endif
}

// A block of `expand` is a run.
static inline void expand(global const uchar* group, int lane, int block, global float* x) {
    const int super = block / (SUPER_WEIGHTS / RUN_WEIGHTS), run = block % (SUPER_WEIGHTS / RUN_WEIGHTS);
    global const uchar* header = group + super * SUPER_HEADER_BYTES;
    global const uint* words = (global const uint*)(group + HEADER_BYTES) + lane;
    words += super * SUPER_WORDS * ROWS_PER_GROUP;
    global const ushort* halves = (global const ushort*)header + lane;
    global const uchar* scales = header + (2 * HEADER_FIELDS + 2 * run) * ROWS_PER_GROUP + lane;
    const float scale = load_half(halves);
#if defined(TYPE_Q6_K)
    const float first = scale * (char)scales[0], second = scale * (char)scales[ROWS_PER_GROUP];
    for (int word = 0; word < 8; ++word)
        vstore4(run_quants(words, run, word) * (word < 4 ? first : second), word, x);
#else
    const float sub_scale = scale * scales[0];
    const float minimum = load_half(halves + ROWS_PER_GROUP) * scales[ROWS_PER_GROUP];
    for (int word = 0; word < 8; ++word)
        vstore4(fma(run_quants(words, run, word), (float4)sub_scale, (float4)-minimum), word, x);
#endif
}
