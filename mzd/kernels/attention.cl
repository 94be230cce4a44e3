// Owns attention over chunks: one pass over the context with an online softmax.
//
// Defines
//   HEAD_DIM       multiple of 8
//   NUM_KV_HEADS
//   GROUP          query heads that share a K/V head
//   TILE           query tokens of one work-item; its TILE * GROUP queries use each K and V vector once loaded
//   QUERIES        TILE * GROUP or more; the surplus, computed and thrown away, fills register blocks
//   LANES          8 or 16, see lanes.cl
//   QK_QUERIES, QK_VECTORS    register block of the score pass: divides QUERIES x (32 / LANES)
//   PV_QUERIES, PV_CHANNELS   register block of the value pass: divides QUERIES x HEAD_DIM, product LANES
//   CHUNK_TOKENS   256
//   SCALE          factor of q . k
//   SOFTCAP        if defined, a score s becomes SOFTCAP * tanh(s / SOFTCAP)
//   WINDOW         if defined, position i sees position j only where i - j < WINDOW
//
// Shapes
//   step         position of the first new token, new tokens, splits, chunks a split, first chunk
//   q, out       (tokens, heads, HEAD_DIM) float, head = kv_head * GROUP + member
//   partials     (splits, tokens, heads, 2 + HEAD_DIM) float: maximum (base 2), sum, unnormalised output
//   chunk_table  (chunks,) addresses, or chunks as arguments, see chunks.cl; a chunk is
//                K [kv_head][t / 32][d][32] half, then V [kv_head][d][256] half
//
// Token i sees the keys 0 .. position + i, or the last WINDOW of them; splits begin at the first chunk, the
// first that any token sees. With CHUNK_ARGUMENTS the splits are those of one launch's chunks, and a launch
// goes on from the partial results of the one before. A work-item is (kv_head, tile of tokens, split of the
// context), the global size; one work-item a group, because a CPU's lanes are the vectors below. Lanes are
// tokens of the context: scores then need no horizontal sum, and one vector of K serves all queries.
// Accumulates in float. Tolerance: 2e-5 against float64 on the same half K and V.

#include "chunks.cl"
#include "lanes.cl"

#define NUM_HEADS (NUM_KV_HEADS * GROUP)
#define K_CHUNK_ELEMENTS (CHUNK_TOKENS * NUM_KV_HEADS * HEAD_DIM)
#define BLOCK_TOKENS 32
#define PARTIAL_FLOATS (2 + HEAD_DIM)
#define ALIGNED __attribute__((aligned(64)))

#ifdef SOFTCAP
#define QUERY_SCALE (2.0f * LOG2_E * SCALE / SOFTCAP)
#else
#define QUERY_SCALE (LOG2_E * SCALE)
#endif

// Whether tokens at `slots` are seen by the query that sees none from `limit` on.
#ifdef WINDOW
#define SEEN(slots, limit) (((slots) < (limit)) & ((slots) >= (limit) - WINDOW))
#else
#define SEEN(slots, limit) ((slots) < (limit))
#endif

// Where the output of channel d and query i lies: in register blocks of the value pass, LANES floats each.
#define PV_LANE(d, i) ((d) % PV_CHANNELS * PV_QUERIES + (i) % PV_QUERIES)
#define OUTPUT(d, i) (((d) / PV_CHANNELS * (QUERIES / PV_QUERIES) + (i) / PV_QUERIES) * LANES + PV_LANE(d, i))

// The query tile, transposed to [d][query] and scaled so that scores are logarithms to base 2, or with a
// soft cap what `capped` takes.
// Queries past the last token repeat it; nothing is written for them.
static inline void load_queries(global const float* q, int first_token, int num_tokens, int kv_head,
                                local float* query) {
    for (int i = 0; i < QUERIES; ++i) {
        const int token = min(first_token + i / GROUP, num_tokens - 1);
        const int head = kv_head * GROUP + i % GROUP;
        global const float* from = q + ((size_t)token * NUM_HEADS + head) * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; ++d) query[d * QUERIES + i] = from[d] * QUERY_SCALE;
    }
}

// score[i][t] = query[i] . key[t] for the 32 tokens of one block of K. Meanwhile asks for `next`, a block of
// the same size, its lines spread evenly over all passes: all of them in the first pass would queue up.
#define PASSES (BLOCK_TOKENS / LANES / QK_VECTORS * (QUERIES / QK_QUERIES))
static inline void score_block(global const half* k, global const half* next, local const float* query,
                               local float* score) {
    for (int v0 = 0; v0 < BLOCK_TOKENS / LANES; v0 += QK_VECTORS) {
        for (int q0 = 0; q0 < QUERIES; q0 += QK_QUERIES) {
            floatv s[QK_QUERIES][QK_VECTORS];
            UNROLL for (int i = 0; i < QK_QUERIES; ++i)
                UNROLL for (int v = 0; v < QK_VECTORS; ++v) s[i][v] = 0.0f;
            for (int d = 0; d < HEAD_DIM; ++d) {
                PREFETCH_LINE(next + d / PASSES * BLOCK_TOKENS);
                floatv key[QK_VECTORS];
                UNROLL for (int v = 0; v < QK_VECTORS; ++v) key[v] = load_halfv(v0 + v, k + d * BLOCK_TOKENS);
                UNROLL for (int i = 0; i < QK_QUERIES; ++i) {
                    const floatv x = query[d * QUERIES + q0 + i];
                    UNROLL for (int v = 0; v < QK_VECTORS; ++v) s[i][v] = fma(x, key[v], s[i][v]);
                }
            }
            UNROLL for (int i = 0; i < QK_QUERIES; ++i)
                UNROLL for (int v = 0; v < QK_VECTORS; ++v)
                    storev(s[i][v], v0 + v, score + (q0 + i) * CHUNK_TOKENS);
            next += HEAD_DIM / PASSES * BLOCK_TOKENS;
        }
    }
}

#ifdef SOFTCAP
// SOFTCAP * tanh(z), times log2(e), from s = 2 z log2(e): tanh(z) = 1 - 2 / (1 + exp(2 z)).
static inline floatv capped(floatv s) {
    const floatv e = exp2v(fmin(s, 126.0f));
    return SOFTCAP * LOG2_E - 2.0f * SOFTCAP * LOG2_E / (1.0f + e);
}
#endif

// Scores of one query to weights relative to the new maximum; the sum follows it. Returns the factor by
// which earlier output shrinks. Tokens from `limit` on, or before
// the window that ends there, are masked: exactly zero, whatever the maximum.
static inline float soften(local float* score, int limit, int num_vectors, local float* running_max,
                           local float* running_sum) {
    const intv lane = LANE_NUMBERS;
    floatv top = LOWEST;
    for (int v = 0; v < num_vectors; ++v) {
#ifdef SOFTCAP
        storev(capped(loadv(v, score)), v, score);
#endif
        top = fmax(top, select((floatv)LOWEST, loadv(v, score), SEEN(lane + LANES * v, limit)));
    }
    const float maximum = fmax(*running_max, maxv(top));
    floatv sum = 0.0f;
    for (int v = 0; v < num_vectors; ++v) {
        const floatv weight = exp2v(loadv(v, score) - maximum);
        const floatv seen = select((floatv)0.0f, weight, SEEN(lane + LANES * v, limit));
        storev(seen, v, score);
        sum += seen;
    }
    const float rescale = exp2(fmax(*running_max - maximum, -126.0f));
    *running_sum = fma(*running_sum, rescale, sumv(sum));
    *running_max = maximum;
    return rescale;
}

// output = output * rescale + sum over t of weight[i][t] * value[d][t], for every channel d and query i.
// Asks for the next channels meanwhile, one of them in each pass over the queries.
static inline void add_values(global const half* value, local const float* weight, int num_vectors,
                              local const float* rescale, local float* output) {
    for (int d0 = 0; d0 < HEAD_DIM; d0 += PV_CHANNELS) {
        for (int q0 = 0; q0 < QUERIES; q0 += PV_QUERIES) {
            floatv s[LANES];
            UNROLL for (int l = 0; l < LANES; ++l) s[l] = 0.0f;
            const int ahead = d0 + PV_CHANNELS + q0 / PV_QUERIES % PV_CHANNELS;
            for (int v = 0; v < num_vectors; ++v) {
                PREFETCH_LINE(value + ahead * CHUNK_TOKENS + v * LANES);
                floatv x[PV_CHANNELS];
                UNROLL for (int c = 0; c < PV_CHANNELS; ++c)
                    x[c] = load_halfv(v, value + (d0 + c) * CHUNK_TOKENS);
                UNROLL for (int i = 0; i < PV_QUERIES; ++i) {
                    const floatv w = loadv(v, weight + (q0 + i) * CHUNK_TOKENS);
                    UNROLL for (int c = 0; c < PV_CHANNELS; ++c)
                        s[SUM_SLOT(PV_LANE(c, i))] = fma(w, x[c], s[SUM_SLOT(PV_LANE(c, i))]);
                }
            }
            local float* block = output + OUTPUT(d0, q0);
            const floatv shrink = loadv(q0 / PV_QUERIES, rescale);
            storev(fma(loadv(0, block), shrink, sum_each(s)), 0, block);
        }
    }
}

// The tile's result, divided by its sum; only for tokens that exist.
static inline void store_output(local const float* output, local const float* running_sum, int first_token,
                                int last_token, int kv_head, global float* out) {
    for (int i = 0; i < (last_token - first_token + 1) * GROUP; ++i) {
        const int head = kv_head * GROUP + i % GROUP;
        global float* to = out + ((size_t)(first_token + i / GROUP) * NUM_HEADS + head) * HEAD_DIM;
        const float scale = 1.0f / running_sum[i];
        for (int d = 0; d < HEAD_DIM; ++d) to[d] = output[OUTPUT(d, i)] * scale;
    }
}

// The tile's state, for attention_merge; `partials` begins at this split.
static inline void store_partial(local const float* output, local const float* running_max,
                                 local const float* running_sum, int first_token, int last_token, int kv_head,
                                 global float* partials) {
    for (int i = 0; i < (last_token - first_token + 1) * GROUP; ++i) {
        const int head = kv_head * GROUP + i % GROUP;
        global float* to = partials + ((size_t)(first_token + i / GROUP) * NUM_HEADS + head) * PARTIAL_FLOATS;
        to[0] = running_max[i];
        to[1] = running_sum[i];
        for (int d = 0; d < HEAD_DIM; ++d) to[2 + d] = output[OUTPUT(d, i)];
    }
}

#ifdef CHUNK_ARGUMENTS
// The inverse of store_partial.
static inline void load_partial(local float* output, local float* running_max, local float* running_sum,
                                int first_token, int last_token, int kv_head, global const float* partials) {
    for (int i = 0; i < (last_token - first_token + 1) * GROUP; ++i) {
        const int head = kv_head * GROUP + i % GROUP;
        global const float* from =
            partials + ((size_t)(first_token + i / GROUP) * NUM_HEADS + head) * PARTIAL_FLOATS;
        running_max[i] = from[0];
        running_sum[i] = from[1];
        for (int d = 0; d < HEAD_DIM; ++d) output[OUTPUT(d, i)] = from[2 + d];
    }
}
#endif

LANES_KERNEL void attention(global const int* step, global const float* q, global float* out,
                            global float* partials, CHUNK_PARAMETERS) {
    AT(step, 0); AT(q, 1); AT(out, 2); AT(partials, 3); AT_CHUNKS;
    local float query[HEAD_DIM * QUERIES] ALIGNED;
    local float output[HEAD_DIM * QUERIES] ALIGNED;
    local float score[QUERIES * CHUNK_TOKENS] ALIGNED;
    local float rescale[QUERIES / PV_QUERIES * LANES] ALIGNED;  // as the lanes of a block of output
    local float running_max[QUERIES];
    local float running_sum[QUERIES];

    const int position = step[0], num_tokens = step[1], num_splits = step[2], split_chunks = step[3];
    const int first_chunk = step[4];
#ifdef CHUNK_ARGUMENTS
    const int launch_end = launch_chunk + num_splits * split_chunks;
    const int is_last_launch = launch_end * CHUNK_TOKENS >= position + num_tokens;
#else
    const int launch_chunk = first_chunk, is_last_launch = 1;
#endif
    const int kv_head = get_group_id(0);
    const int first_token = get_group_id(1) * TILE;
    const int last_token = min(first_token + TILE, num_tokens) - 1;
    const int split = get_group_id(2);

    load_queries(q, first_token, num_tokens, kv_head, query);
    for (int i = 0; i < HEAD_DIM * QUERIES; ++i) output[i] = 0.0f;
    for (int i = 0; i < QUERIES; ++i) {
        running_max[i] = LOWEST;
        running_sum[i] = 0.0f;
    }
    partials += (size_t)split * num_tokens * NUM_HEADS * PARTIAL_FLOATS;
#ifdef CHUNK_ARGUMENTS
    if (launch_chunk > first_chunk)
        load_partial(output, running_max, running_sum, first_token, last_token, kv_head, partials);
#endif

    const int visible = position + last_token + 1;  // keys that some token of the tile sees
    const int end = min((launch_chunk + (split + 1) * split_chunks) * CHUNK_TOKENS, visible);
    int begin = (launch_chunk + split * split_chunks) * CHUNK_TOKENS;
#ifdef WINDOW  // not the chunks that no token of the tile sees
    begin = max(begin, (position + first_token + 1 - WINDOW) / CHUNK_TOKENS * CHUNK_TOKENS);
#endif
    for (; begin < end; begin += CHUNK_TOKENS) {
        const size_t head_elements = (size_t)kv_head * CHUNK_TOKENS * HEAD_DIM;
        global const half* k = CHUNK(begin / CHUNK_TOKENS) + head_elements;
        const int count = min(end - begin, CHUNK_TOKENS);
        global const half* value = k + K_CHUNK_ELEMENTS;
        for (int t = 0; t < count; t += BLOCK_TOKENS) {
            global const half* next = t + BLOCK_TOKENS < count ? k + (t + BLOCK_TOKENS) * HEAD_DIM : value;
            score_block(k + t * HEAD_DIM, next, query, score + t);
        }

        const int num_vectors = (count + LANES - 1) / LANES;
        for (int i = 0; i < QUERIES; ++i) {
            const int limit = position + min(first_token + i / GROUP, last_token) + 1 - begin;
            const float shrink =
                soften(score + i * CHUNK_TOKENS, limit, num_vectors, running_max + i, running_sum + i);
            for (int c = 0; c < PV_CHANNELS; ++c) rescale[i / PV_QUERIES * LANES + PV_LANE(c, i)] = shrink;
        }
        add_values(value, score, num_vectors, rescale, output);
    }
    if (num_splits == 1 && is_last_launch) {
        store_output(output, running_sum, first_token, last_token, kv_head, out);
    } else {
        store_partial(output, running_max, running_sum, first_token, last_token, kv_head, partials);
    }
}

// out = the splits' partial results, brought to one maximum. A split that saw nothing of a token has the sum
// 0 and the lowest maximum, so its share is 0.
//
// One work-item a (head, token), the global size.
ONE_WORK_ITEM kernel void attention_merge(global const int* step, global const float* partials,
                                          global float* out PLACES3) {
    AT(step, 0); AT(partials, 1); AT(out, 2);
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
