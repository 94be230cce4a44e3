// Owns the gather of embedding rows out of the packed matrix (mzd/formats/weight_layout.py).
//
// Defines: COLS, GROUP_BYTES (distance between eight-row groups), HEADER_BYTES (offset of the payload in a
// group), and one of TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q4_K, TYPE_Q5_K,
// TYPE_Q6_K.

#include "vector.cl"

#define ROWS_PER_GROUP 8
#define BLOCK_WEIGHTS 32

// One half at any even address. By four because a single vload_half is emulated in software on PoCL.
static inline float load_half(global const ushort* bits) {
    const ushort4 four = (ushort4)(*bits, 0, 0, 0);
    return vload_half4(0, (const half*)&four).s0;
}

#if defined(TYPE_F32)
static inline void expand(global const uchar* group, int lane, global float* x) {
    global const float* payload = (global const float*)group + lane;
    for (int c = 0; c < COLS; ++c) x[c] = payload[c * ROWS_PER_GROUP];
}
#elif defined(TYPE_F16)
static inline void expand(global const uchar* group, int lane, global float* x) {
    global const ushort* payload = (global const ushort*)group + lane;
    for (int c = 0; c < COLS; ++c) x[c] = load_half(payload + c * ROWS_PER_GROUP);
}
#elif defined(TYPE_BF16)
static inline void expand(global const uchar* group, int lane, global float* x) {
    global const ushort* payload = (global const ushort*)group + lane;
    for (int c = 0; c < COLS; ++c) x[c] = as_float((uint)payload[c * ROWS_PER_GROUP] << 16);
}
#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K) || defined(TYPE_Q6_K)
#include "embedding_k.cl"
#elif defined(TYPE_Q8_0)
static inline void expand(global const uchar* group, int lane, global float* x) {
    global const ushort* scales = (global const ushort*)group + lane;
    global const int* payload = (global const int*)(group + HEADER_BYTES) + lane;
    for (int block = 0; block < COLS / BLOCK_WEIGHTS; ++block) {
        const float scale = load_half(scales + block * ROWS_PER_GROUP);
        for (int word = 0; word < 8; ++word) {
            const char4 q = as_char4(payload[(block * 8 + word) * ROWS_PER_GROUP]);
            vstore4(convert_float4(q) * scale, 0, x + block * BLOCK_WEIGHTS + 4 * word);
        }
    }
}
#else  // Q4_0: (q - 8) * scale; Q4_1: q * scale + minimum. Low nibbles are the block's first 16 weights.
static inline void expand(global const uchar* group, int lane, global float* x) {
    global const ushort* headers = (global const ushort*)group + lane;
    global const uint* payload = (global const uint*)(group + HEADER_BYTES) + lane;
    for (int block = 0; block < COLS / BLOCK_WEIGHTS; ++block) {
#if defined(TYPE_Q4_1)
        const float scale = load_half(headers + (2 * block) * ROWS_PER_GROUP);
        const float base = load_half(headers + (2 * block + 1) * ROWS_PER_GROUP);
#else
        const float scale = load_half(headers + block * ROWS_PER_GROUP);
        const float base = -8.0f * scale;
#endif
        for (int word = 0; word < 4; ++word) {
            const uint q = payload[(block * 4 + word) * ROWS_PER_GROUP];
            const float4 low = convert_float4(as_uchar4(q & 0x0f0f0f0fu));
            const float4 high = convert_float4(as_uchar4((q >> 4) & 0x0f0f0f0fu));
            global float* to = x + block * BLOCK_WEIGHTS + 4 * word;
            vstore4(fma(low, (float4)scale, (float4)base), 0, to);
            vstore4(fma(high, (float4)scale, (float4)base), 0, to + 16);
        }
    }
}
#endif

// x[t] = row tokens[t] of the embedding matrix, as float; with SCALE defined, times that
//
//   tokens   (tokens,) int, each below the number of rows
//   matrix   packed, 64-byte aligned
//   x        (tokens, COLS) float
//
// One work-item a token (global size: tokens). Exact for F32, F16, BF16, Q8_0 and Q6_K, one rounding for the others.
ONE_WORK_ITEM kernel void embed(global const int* tokens, global const uchar* matrix, global float* x) {
    const int token = get_global_id(0);
    const int row = tokens[token];
    x += (size_t)token * COLS;
    expand(matrix + (size_t)(row / ROWS_PER_GROUP) * GROUP_BYTES, row % ROWS_PER_GROUP, x);
#ifdef SCALE
    for (int c = 0; c < COLS; ++c) x[c] *= SCALE;
#endif
}
