// Owns what happens to q, k and v before attention: bias and norm, rotation by position, and k and v into
// their chunks.
//
// Defines
//   NUM_HEADS, NUM_KV_HEADS, CHUNK_TOKENS
//   HEAD_DIM      multiple of 8
//   ROPE_DIMS     multiple of 8, <= HEAD_DIM: the leading channels of a head that rotate; 0: none
//   ROPE_HALVES   1: channel i turns with i + ROPE_DIMS / 2; 0: with its neighbour, where a
//                 file's weights are permuted for that
//   QKV_BIAS      if defined, biases are added to q, k and v
//   QK_NORM_EPS   if defined, each head of q and k is then normalised, with this epsilon

#include "chunks.cl"
#include "vector.cl"

#define ROPE_PAIRS (ROPE_DIMS / 2)
#define KV_COLS (NUM_KV_HEADS * HEAD_DIM)
#define K_CHUNK_ELEMENTS (CHUNK_TOKENS * KV_COLS)
#define BLOCK_TOKENS 32

// Rotate the leading channels of one head in place; angles: ROPE_PAIRS cosines, then as many sines.
static inline void rotate(global float* head, global const float* angles) {
    for (int pair = 0; pair < ROPE_PAIRS; pair += 4) {
        const float4 c = vload4(0, angles + pair);
        const float4 s = vload4(0, angles + ROPE_PAIRS + pair);
#if ROPE_HALVES
        const float4 a = vload4(0, head + pair);
        const float4 b = vload4(0, head + ROPE_PAIRS + pair);
        vstore4(a * c - b * s, 0, head + pair);
        vstore4(a * s + b * c, 0, head + ROPE_PAIRS + pair);
#else
        const float8 x = vload8(0, head + 2 * pair);
        float8 y;
        y.even = x.even * c - x.odd * s;
        y.odd = x.even * s + x.odd * c;
        vstore8(y, 0, head + 2 * pair);
#endif
    }
}

#ifdef QKV_BIAS
static inline void add_bias(global float* x, global const float* bias, int count) {
    for (int c = 0; c < count; c += 8) vstore8(vload8(0, x + c) + vload8(0, bias + c), 0, x + c);
}
#endif

#ifdef QK_NORM_EPS
// RMS norm of one head in place.
static inline void normalise(global float* head, global const float* weight) {
    float8 squares = 0.0f;
    for (int d = 0; d < HEAD_DIM; d += 8) {
        const float8 v = vload8(0, head + d);
        squares = fma(v, v, squares);
    }
    const float scale = 1.0f / sqrt(sum8(squares) / HEAD_DIM + QK_NORM_EPS);
    for (int d = 0; d < HEAD_DIM; d += 8)
        vstore8(vload8(0, head + d) * scale * vload8(0, weight + d), 0, head + d);
}
#endif

// Store eight channels of one token as half, `stride` elements apart. Clamped to half's range: an infinity
// would turn the zero weight of a masked token into NaN.
static inline void store_channels(float8 x, global half* destination, int stride) {
    ushort8 bits;
    vstore_half8(clamp(x, -65504.0f, 65504.0f), 0, (half*)&bits);
    global ushort* to = (global ushort*)destination;
    to[0 * stride] = bits.s0;
    to[1 * stride] = bits.s1;
    to[2 * stride] = bits.s2;
    to[3 * stride] = bits.s3;
    to[4 * stride] = bits.s4;
    to[5 * stride] = bits.s5;
    to[6 * stride] = bits.s6;
    to[7 * stride] = bits.s7;
}

// Bias, norm and rotation of q and k in place; k and v of the new tokens into the layer's chunks.
//
//   step         position of the first token, ...
//   angles       (tokens, 2, ROPE_PAIRS) float: cosines, then sines, of each token's position
//   q            (tokens, NUM_HEADS, HEAD_DIM) float
//   k, v         (tokens, NUM_KV_HEADS, HEAD_DIM) float; changed in place
//   chunks       (chunks,) addresses of chunks, or the one chunk of the launch's tokens, see chunks.cl; a
//                chunk is K [kv_head][t / 32][d][32] half, then V [kv_head][d][256] half
//   q_bias, k_bias, v_bias    (heads * HEAD_DIM,) float, of as many heads as q, k or v
//   q_norm, k_norm            (HEAD_DIM,) float; these and the biases may be anything where there are none
//
//   first_token  of the step's tokens, the first of the launch
//
// One work-item a token (global size: 1, tokens). The result is rounded once, to half.
ONE_WORK_ITEM kernel void rope_kv(global const int* step, global const float* angles, global float* q,
                                  global float* k, global float* v, global void* chunks,
                                  global const float* q_bias, global const float* k_bias,
                                  global const float* v_bias, global const float* q_norm,
                                  global const float* k_norm, const int first_token PLACES11) {
    AT(step, 0); AT(angles, 1); AT(q, 2); AT(k, 3); AT(v, 4); AT(chunks, 5);
    AT(q_bias, 6); AT(k_bias, 7); AT(v_bias, 8); AT(q_norm, 9); AT(k_norm, 10);
    const int token = first_token + get_global_id(1);
    const int position = step[0] + token;
    const int t = position % CHUNK_TOKENS;
    global half* chunk = chunk_of(chunks, position);
    angles += (size_t)token * ROPE_DIMS;
    q += (size_t)token * NUM_HEADS * HEAD_DIM;
    k += (size_t)token * KV_COLS;
    v += (size_t)token * KV_COLS;

#ifdef QKV_BIAS
    add_bias(q, q_bias, NUM_HEADS * HEAD_DIM);
    add_bias(k, k_bias, KV_COLS);
    add_bias(v, v_bias, KV_COLS);
#endif
#ifdef QK_NORM_EPS
    for (int head = 0; head < NUM_HEADS; ++head) normalise(q + head * HEAD_DIM, q_norm);
    for (int head = 0; head < NUM_KV_HEADS; ++head) normalise(k + head * HEAD_DIM, k_norm);
#endif
    for (int head = 0; head < NUM_HEADS; ++head) rotate(q + head * HEAD_DIM, angles);
    for (int head = 0; head < NUM_KV_HEADS; ++head) rotate(k + head * HEAD_DIM, angles);

    global half* k_to = chunk + (t / BLOCK_TOKENS) * BLOCK_TOKENS * HEAD_DIM + t % BLOCK_TOKENS;
    global half* v_to = chunk + K_CHUNK_ELEMENTS + t;
    for (int head = 0; head < NUM_KV_HEADS; ++head) {
        for (int d = 0; d < HEAD_DIM; d += 8) {
            const size_t row = (size_t)head * CHUNK_TOKENS * HEAD_DIM;
            store_channels(vload8(0, k + head * HEAD_DIM + d), k_to + row + d * BLOCK_TOKENS, BLOCK_TOKENS);
            store_channels(vload8(0, v + head * HEAD_DIM + d), v_to + row + d * CHUNK_TOKENS, CHUNK_TOKENS);
        }
    }
}
