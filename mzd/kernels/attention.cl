// Owns attention over chunks: one pass over a table of chunk addresses with an online softmax.
//
// Defines
//   HEAD_DIM       multiple of 8
//   NUM_KV_HEADS
//   GROUP          query heads that share a K/V head
//   TILE           query tokens of one work-item; QUERIES = TILE * GROUP use each K and V vector once loaded
//   QK_QUERIES, QK_VECTORS    register block of the score pass: queries x 8-token vectors, divides QUERIES x 4
//   PV_QUERIES, PV_CHANNELS   register block of the value pass, divides QUERIES x HEAD_DIM
//   CHUNK_TOKENS   256
//
// Shapes
//   step         position of the first new token, new tokens, splits, chunks a split
//   chunk_table  (chunks,) addresses; a chunk is K [kv_head][t / 32][d][32] half, then V [kv_head][d][256] half
//   q, out       (tokens, heads, HEAD_DIM) float, head = kv_head * GROUP + member
//   partials     (splits, tokens, heads, 2 + HEAD_DIM) float: maximum (base 2), sum, unnormalised output
//
// Token i sees the keys 0 .. position + i. A work-item is (kv_head, tile of tokens, split of the context),
// the global size; one work-item a group, because a CPU's lanes are the float8 below. Lanes are tokens of the
// context: scores then need no horizontal sum, and one vector of K serves all queries.
// Accumulates in float. Tolerance: 2e-5 against float64 on the same half K and V.

#include "vector.cl"

#define QUERIES (TILE * GROUP)
#define NUM_HEADS (NUM_KV_HEADS * GROUP)
#define K_CHUNK_ELEMENTS (CHUNK_TOKENS * NUM_KV_HEADS * HEAD_DIM)
#define BLOCK_TOKENS 32
#define PARTIAL_FLOATS (2 + HEAD_DIM)

// Prefetch the line at `pointer`; through size_t because the builtin refuses a global pointer.
#define PREFETCH(pointer) __builtin_prefetch((const void*)(size_t)(pointer))

// The query tile, transposed to [d][query] and scaled so that scores are logarithms to base 2.
// Queries past the last token repeat it; nothing is written for them.
static inline void load_queries(global const float* q, int first_token, int num_tokens, int kv_head,
                                local float* query) {
    const float scale = LOG2_E / sqrt((float)HEAD_DIM);
    for (int i = 0; i < QUERIES; ++i) {
        const int token = min(first_token + i / GROUP, num_tokens - 1);
        const int head = kv_head * GROUP + i % GROUP;
        global const float* from = q + ((size_t)token * NUM_HEADS + head) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; ++d) query[d * QUERIES + i] = from[d] * scale;
    }
}

// score[i][t] = query[i] . key[t] for the 32 tokens of one block of K.
static inline void score_block(global const half* k, local const float* query, local float* score) {
    for (int v0 = 0; v0 < BLOCK_TOKENS / 8; v0 += QK_VECTORS) {
        for (int q0 = 0; q0 < QUERIES; q0 += QK_QUERIES) {
            float8 s[QK_QUERIES][QK_VECTORS];
            UNROLL for (int i = 0; i < QK_QUERIES; ++i)
                UNROLL for (int v = 0; v < QK_VECTORS; ++v) s[i][v] = 0.0f;
            for (int d = 0; d < HEAD_DIM; ++d) {
                float8 key[QK_VECTORS];
                UNROLL for (int v = 0; v < QK_VECTORS; ++v) key[v] = vload_half8(v0 + v, k + d * BLOCK_TOKENS);
                UNROLL for (int i = 0; i < QK_QUERIES; ++i) {
                    const float8 x = query[d * QUERIES + q0 + i];
                    UNROLL for (int v = 0; v < QK_VECTORS; ++v) s[i][v] = fma(x, key[v], s[i][v]);
                }
            }
            UNROLL for (int i = 0; i < QK_QUERIES; ++i)
                UNROLL for (int v = 0; v < QK_VECTORS; ++v)
                    vstore8(s[i][v], v0 + v, score + (q0 + i) * CHUNK_TOKENS);
        }
    }
}

// Scores of one query to weights relative to the new maximum; the old sum and `*rescale` follow it.
// Tokens from `limit` on are masked: exactly zero, whatever the running maximum.
static inline void soften(local float* score, int limit, int num_vectors, local float* running_max,
                          local float* running_sum, local float* rescale) {
    const int8 lane = (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    float8 top = LOWEST;
    for (int v = 0; v < num_vectors; ++v) {
        const float8 s = vload8(v, score);
        top = fmax(top, select((float8)LOWEST, s, lane + 8 * v < limit));
    }
    const float maximum = fmax(*running_max, max8(top));
    float8 sum = 0.0f;
    for (int v = 0; v < num_vectors; ++v) {
        const float8 p = exp2_vector(vload8(v, score) - maximum);
        const float8 weight = select((float8)0.0f, p, lane + 8 * v < limit);
        vstore8(weight, v, score);
        sum += weight;
    }
    *rescale = exp2(fmax(*running_max - maximum, -126.0f));
    *running_sum = fma(*running_sum, *rescale, sum8(sum));
    *running_max = maximum;
}

// output[d][i] = output[d][i] * rescale[i] + sum over t of weight[i][t] * value[d][t]
static inline void add_values(global const half* value, local const float* weight, int num_vectors,
                              local const float* rescale, local float* output) {
    for (int d0 = 0; d0 < HEAD_DIM; d0 += PV_CHANNELS) {
        for (int q0 = 0; q0 < QUERIES; q0 += PV_QUERIES) {
            float8 s[PV_CHANNELS][PV_QUERIES];
            UNROLL for (int c = 0; c < PV_CHANNELS; ++c)
                UNROLL for (int i = 0; i < PV_QUERIES; ++i) s[c][i] = 0.0f;
            for (int v = 0; v < num_vectors; ++v) {
                float8 x[PV_CHANNELS];
                UNROLL for (int c = 0; c < PV_CHANNELS; ++c)
                    x[c] = vload_half8(v, value + (d0 + c) * CHUNK_TOKENS);
                UNROLL for (int i = 0; i < PV_QUERIES; ++i) {
                    const float8 w = vload8(v, weight + (q0 + i) * CHUNK_TOKENS);
                    UNROLL for (int c = 0; c < PV_CHANNELS; ++c) s[c][i] = fma(w, x[c], s[c][i]);
                }
            }
            UNROLL for (int c = 0; c < PV_CHANNELS; ++c)
                UNROLL for (int i = 0; i < PV_QUERIES; ++i) {
                    local float* o = output + (d0 + c) * QUERIES + q0 + i;
                    *o = fma(*o, rescale[q0 + i], sum8(s[c][i]));
                }
        }
    }
}

// The tile's result, divided by its sum; only for tokens that exist.
static inline void store_output(local const float* output, local const float* running_sum, int first_token,
                                int num_tokens, int kv_head, global float* out) {
    for (int i = 0; i < QUERIES && first_token + i / GROUP < num_tokens; ++i) {
        const int head = kv_head * GROUP + i % GROUP;
        global float* to = out + ((size_t)(first_token + i / GROUP) * NUM_HEADS + head) * HEAD_DIM;
        const float scale = 1.0f / running_sum[i];
        for (int d = 0; d < HEAD_DIM; ++d) to[d] = output[d * QUERIES + i] * scale;
    }
}

// The tile's state, for attention_merge; `partials` begins at this split.
static inline void store_partial(local const float* output, local const float* running_max,
                                 local const float* running_sum, int first_token, int num_tokens, int kv_head,
                                 global float* partials) {
    for (int i = 0; i < QUERIES && first_token + i / GROUP < num_tokens; ++i) {
        const int head = kv_head * GROUP + i % GROUP;
        global float* to = partials + ((size_t)(first_token + i / GROUP) * NUM_HEADS + head) * PARTIAL_FLOATS;
        to[0] = running_max[i];
        to[1] = running_sum[i];
        for (int d = 0; d < HEAD_DIM; ++d) to[2 + d] = output[d * QUERIES + i];
    }
}

ONE_WORK_ITEM kernel void attention(global const int* step, global const ulong* chunk_table,
                                    global const float* q, global float* out, global float* partials) {
    local float query[HEAD_DIM * QUERIES];
    local float output[HEAD_DIM * QUERIES];
    local float score[QUERIES * CHUNK_TOKENS];
    local float running_max[QUERIES];
    local float running_sum[QUERIES];
    local float rescale[QUERIES];

    const int position = step[0], num_tokens = step[1], num_splits = step[2], split_chunks = step[3];
    const int kv_head = get_group_id(0);
    const int first_token = get_group_id(1) * TILE;
    const int split = get_group_id(2);

    load_queries(q, first_token, num_tokens, kv_head, query);
    for (int i = 0; i < HEAD_DIM * QUERIES; ++i) output[i] = 0.0f;
    for (int i = 0; i < QUERIES; ++i) {
        running_max[i] = LOWEST;
        running_sum[i] = 0.0f;
    }

    // Keys that the tile's last token sees, of all and of one chunk.
    const int last_token = min(first_token + TILE, num_tokens) - 1;
    const int visible = position + last_token + 1;
    const int end = min((split + 1) * split_chunks * CHUNK_TOKENS, visible);
    for (int begin = split * split_chunks * CHUNK_TOKENS; begin < end; begin += CHUNK_TOKENS) {
        const size_t head_elements = (size_t)kv_head * CHUNK_TOKENS * HEAD_DIM;
        global const half* k = (global const half*)chunk_table[begin / CHUNK_TOKENS] + head_elements;
        const int count = min(end - begin, CHUNK_TOKENS);
        for (int t = 0; t < count; t += BLOCK_TOKENS) score_block(k + t * HEAD_DIM, query, score + t);

        const int num_vectors = (count + 7) / 8;
        for (int i = 0; i < QUERIES; ++i) {
            const int limit = position + min(first_token + i / GROUP, last_token) + 1 - begin;
            soften(score + i * CHUNK_TOKENS, limit, num_vectors, running_max + i, running_sum + i, rescale + i);
        }
        add_values(k + K_CHUNK_ELEMENTS, score, num_vectors, rescale, output);
    }
    if (num_splits == 1) {
        store_output(output, running_sum, first_token, num_tokens, kv_head, out);
    } else {
        partials += (size_t)split * num_tokens * NUM_HEADS * PARTIAL_FLOATS;
        store_partial(output, running_max, running_sum, first_token, num_tokens, kv_head, partials);
    }
}

// out = the splits' partial results, brought to one maximum. A split that saw nothing of a token has the sum
// 0 and the lowest maximum, so its share is 0.
//
// One work-item a (head, token), the global size.
ONE_WORK_ITEM kernel void attention_merge(global const int* step, global const float* partials,
                                          global float* out) {
    const int num_tokens = step[1], num_splits = step[2];
    const size_t row = (size_t)get_group_id(1) * NUM_HEADS + get_group_id(0);
    const size_t stride = (size_t)num_tokens * NUM_HEADS * PARTIAL_FLOATS;
    partials += row * PARTIAL_FLOATS;
    out += row * HEAD_DIM;

    float maximum = LOWEST;
    for (int s = 0; s < num_splits; ++s) maximum = fmax(maximum, partials[s * stride]);
    float sum = 0.0f;
    for (int d = 0; d < HEAD_DIM; ++d) out[d] = 0.0f;
    for (int s = 0; s < num_splits; ++s) {
        global const float* partial = partials + s * stride;
        const float share = exp2(fmax(partial[0] - maximum, -126.0f));
        sum = fma(partial[1], share, sum);
        for (int d = 0; d < HEAD_DIM; ++d) out[d] = fma(partial[2 + d], share, out[d]);
    }
    const float scale = 1.0f / sum;
    for (int d = 0; d < HEAD_DIM; ++d) out[d] *= scale;
}
