// Owns the gather of embedding rows out of the packed matrix (mzd/formats/weight_layout.py).
//
// Defines: COLS, GROUP_BYTES (distance between eight-row groups), HEADER_BYTES (offset of the payload in a
// group), GROUP_LANES, and one of TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_Q8_0, TYPE_Q4_0, TYPE_Q4_1, TYPE_Q4_K,
// TYPE_Q5_K, TYPE_Q6_K.

#include "places.cl"
#include "vector.cl"

#define ROWS_PER_GROUP 8

#if defined(TYPE_F32) || defined(TYPE_F16) || defined(TYPE_BF16)
#define BLOCK_WEIGHTS 1  // that `expand` writes at a time
#else
#define BLOCK_WEIGHTS 32
#endif

// One half at any even address. By four because a single vload_half is emulated in software on PoCL.
static inline float load_half(global const ushort* bits) {
    const ushort4 four = (ushort4)(*bits, 0, 0, 0);
    return vload_half4(0, (const half*)&four).s0;
}

// x[0] and on = the block of that number, of row `lane` of the group.
#if defined(TYPE_F32)
static inline void expand(global const uchar* group, int lane, int block, global float* x) {
    *x = ((global const float*)group)[block * ROWS_PER_GROUP + lane];
}
#elif defined(TYPE_F16)
static inline void expand(global const uchar* group, int lane, int block, global float* x) {
    *x = load_half((global const ushort*)group + block * ROWS_PER_GROUP + lane);
}
#elif defined(TYPE_BF16)
static inline void expand(global const uchar* group, int lane, int block, global float* x) {
    *x = as_float((uint)((global const ushort*)group)[block * ROWS_PER_GROUP + lane] << 16);
}
#elif defined(TYPE_Q4_K) || defined(TYPE_Q5_K) || defined(TYPE_Q6_K)
#include "embedding_k.cl"
#elif defined(TYPE_Q8_0)
static inline void expand(global const uchar* group, int lane, int block, global float* x) {
    global const ushort* scales = (global const ushort*)group + lane;
    global const int* payload = (global const int*)(group + HEADER_BYTES) + lane;
    const float scale = load_half(scales + block * ROWS_PER_GROUP);
    for (int word = 0; word < 8; ++word) {
        const char4 q = as_char4(payload[(block * 8 + word) * ROWS_PER_GROUP]);
        vstore4(convert_float4(q) * scale, word, x);
    }
}
#else  // Q4_0: (q - 8) * scale; Q4_1: q * scale + minimum. Low nibbles are the block's first 16 weights.
static inline void expand(global const uchar* group, int lane, int block, global float* x) {
    global const ushort* headers = (global const ushort*)group + lane;
    global const uint* payload = (global const uint*)(group + HEADER_BYTES) + lane;
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
        vstore4(fma(low, (float4)scale, (float4)base), word, x);
        vstore4(fma(high, (float4)scale, (float4)base), word + 4, x);
    }
}
#endif

// x[t] = row tokens[t] of the embedding matrix, as float; with SCALE defined, times that
//
//   tokens   (tokens,) int, each below the number of rows
//   matrix   packed, 64-byte aligned
//   x        (tokens, COLS) float
//
// One work-group a token (global size: tokens * GROUP_LANES), whose lanes take blocks in turn. Exact for F32,
// F16, BF16, Q8_0 and Q6_K, one rounding for the others.
__attribute__((reqd_work_group_size(GROUP_LANES, 1, 1)))
kernel void embed(global const int* tokens, global const uchar* matrix, global float* x PLACES3) {
    AT(tokens, 0); AT(matrix, 1); AT(x, 2);
    const int token = get_group_id(0);
    const int row = tokens[token];
    global const uchar* group = matrix + (size_t)(row / ROWS_PER_GROUP) * GROUP_BYTES;
    x += (size_t)token * COLS;
    for (int block = get_local_id(0); block < COLS / BLOCK_WEIGHTS; block += GROUP_LANES) {
        global float* to = x + block * BLOCK_WEIGHTS;
        expand(group, row % ROWS_PER_GROUP, block, to);
#ifdef SCALE
        for (int c = 0; c < BLOCK_WEIGHTS; ++c) to[c] *= SCALE;
#endif
    }
}
