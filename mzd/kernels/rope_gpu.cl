// Owns what happens to q, k and v before attention, for devices whose work-groups cooperate through local
// memory: bias and norm, rotation by position, and k and v into their chunks.
//
// Defines as rope.cl, and GROUP_LANES.

#include "chunks.cl"
#include "work_group.cl"

#define ROPE_PAIRS (ROPE_DIMS / 2)
#define K_CHUNK_ELEMENTS (CHUNK_TOKENS * NUM_KV_HEADS * HEAD_DIM)
#define BLOCK_TOKENS 32

// The channels that turn with each other.
#if ROPE_HALVES
#define FIRST(pair) (pair)
#define SECOND(pair) ((pair) + ROPE_PAIRS)
#else
#define FIRST(pair) (2 * (pair))
#define SECOND(pair) (2 * (pair) + 1)
#endif

// One head to local memory, with its bias added.
static inline void load_head(global const float* from, global const float* bias, local float* x) {
    for (int d = get_local_id(0); d < HEAD_DIM; d += GROUP_LANES) {
#ifdef QKV_BIAS
        x[d] = from[d] + bias[d];
#else
        x[d] = from[d];
#endif
    }
}

// RMS norm of the head, unless `skip`; a lane changes only what it has loaded.
static inline void normalise(global const float* weight, local float* x, local float* scratch, bool skip) {
#ifdef QK_NORM_EPS
    float squares = 0.0f;
    for (int d = get_local_id(0); d < HEAD_DIM; d += GROUP_LANES) squares = fma(x[d], x[d], squares);
    const float scale = 1.0f / sqrt(group_sum(scratch, squares) / HEAD_DIM + QK_NORM_EPS);
    if (skip) return;
    for (int d = get_local_id(0); d < HEAD_DIM; d += GROUP_LANES) x[d] *= scale * weight[d];
#endif
}

// Rotate the leading channels; angles: ROPE_PAIRS cosines, then as many sines.
static inline void rotate(global const float* angles, local float* x) {
    for (int pair = get_local_id(0); pair < ROPE_PAIRS; pair += GROUP_LANES) {
        const float c = angles[pair], s = angles[ROPE_PAIRS + pair];
        const float a = x[FIRST(pair)], b = x[SECOND(pair)];
        x[FIRST(pair)] = a * c - b * s;
        x[SECOND(pair)] = a * s + b * c;
    }
}

// The head as half, its channels `stride` elements apart. Clamped to half's range: an infinity would turn the
// zero weight of a masked token into NaN.
static inline void store_halves(local const float* x, global half* to, int stride) {
    for (int d = get_local_id(0); d < HEAD_DIM; d += GROUP_LANES)
        vstore_half_rte(clamp(x[d], -65504.0f, 65504.0f), 0, to + d * stride);
}

// As rope_kv of rope.cl, except that k and v stay as they are.
//
// One work-group a head of q, k or v, in this order, and token (global size: heads * GROUP_LANES, tokens).
// Every barrier stands outside of branches, which q, k and v share: PoCL 3.1 computes nonsense where each has
// its own, although a whole work-group takes the same one.
COOPERATIVE kernel void rope_kv(global const int* step, global const float* angles, global float* q,
                                global const float* k, global const float* v, global void* chunks,
                                global const float* q_bias, global const float* k_bias,
                                global const float* v_bias, global const float* q_norm,
                                global const float* k_norm, const int first_token PLACES11) {
    AT(step, 0); AT(angles, 1); AT(q, 2); AT(k, 3); AT(v, 4); AT(chunks, 5);
    AT(q_bias, 6); AT(k_bias, 7); AT(v_bias, 8); AT(q_norm, 9); AT(k_norm, 10);
    local float x[HEAD_DIM];
    local float scratch[GROUP_LANES];
    const int token = first_token + get_group_id(1);
    const int position = step[0] + token, t = position % CHUNK_TOKENS;
    const int group = get_group_id(0);
    const bool is_q = group < NUM_HEADS, is_v = group >= NUM_HEADS + NUM_KV_HEADS;
    const int head = is_q ? group : (group - NUM_HEADS) % NUM_KV_HEADS;
    angles += (size_t)token * ROPE_DIMS;
    q += ((size_t)token * NUM_HEADS + head) * HEAD_DIM;

    global const float* from = is_q ? q : (is_v ? v : k) + ((size_t)token * NUM_KV_HEADS + head) * HEAD_DIM;
    load_head(from, (is_q ? q_bias : is_v ? v_bias : k_bias) + head * HEAD_DIM, x);
    normalise(is_q ? q_norm : k_norm, x, scratch, is_v);
    LOCAL_BARRIER;
    if (!is_v) rotate(angles, x);
    LOCAL_BARRIER;
    if (is_q) {
        for (int d = get_local_id(0); d < HEAD_DIM; d += GROUP_LANES) q[d] = x[d];
        return;
    }
    global half* row = chunk_of(chunks, position) + (size_t)head * CHUNK_TOKENS * HEAD_DIM;
    const int block = t / BLOCK_TOKENS * BLOCK_TOKENS;
    if (is_v)
        store_halves(x, row + K_CHUNK_ELEMENTS + t, CHUNK_TOKENS);
    else
        store_halves(x, row + block * HEAD_DIM + t % BLOCK_TOKENS, BLOCK_TOKENS);
}
