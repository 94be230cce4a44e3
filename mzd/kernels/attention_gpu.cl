// Owns attention over chunks for devices whose work-groups cooperate through local memory.
//
// As attention.cl in meaning, in `step`, `q`, `out` and the chunks. Defines, beside HEAD_DIM, NUM_KV_HEADS,
// GROUP, TILE, CHUNK_TOKENS, SCALE, SOFTCAP and WINDOW as there:
//   QUERIES           TILE * GROUP, rounded up to a multiple of 4; the surplus is computed and thrown away
//   QUERY_LANES       lanes of the softmax for each query; a power of two, at most GROUP_LANES / QUERIES
//   GROUP_LANES       work-items of a work-group, at least QUERIES; a power of two
//   PASS_TOKENS       tokens of the context between two barriers: 64, 128 or 256
//   TOKENS_A_LANE     2, 4 or 8: register block of the score pass, with all queries. Lanes beyond
//                     PASS_TOKENS / TOKENS_A_LANE take other channels of the same tokens.
//   CHANNELS_A_LANE   divides HEAD_DIM: register block of the value pass, with all queries. Lanes beyond
//                     HEAD_DIM / CHANNELS_A_LANE take other tokens of the same channels.
//
//   partials  (splits, tokens, heads, HEAD_DIM) float: unnormalised output; then (splits, tokens, heads, 2):
//             maximum (base 2), sum. Apart, so that rows of output are aligned.
//
// A work-group is (kv_head, tile of tokens, split of the context), the global size in work-groups. Its
// queries lie in local memory and are read by all lanes at once, each K and V element is read once, by one
// lane, and the weights cross between the two passes in local memory.
// Accumulates in float. Tolerance: 2e-5 against float64 on the same half K and V.

#include "chunks.cl"
#include "work_group.cl"

#define NUM_HEADS (NUM_KV_HEADS * GROUP)
#define K_CHUNK_ELEMENTS (CHUNK_TOKENS * NUM_KV_HEADS * HEAD_DIM)
#define BLOCK_TOKENS 32
#define PIECE_TOKENS 8  // of V in 16 bytes
#define QUADS (QUERIES / 4)
#define HEAD_QUADS (HEAD_DIM / 4)

#define TOKEN_LANES (PASS_TOKENS / TOKENS_A_LANE)
#define CHANNEL_PARTS (GROUP_LANES / TOKEN_LANES)
#define PART_CHANNELS (HEAD_DIM / CHANNEL_PARTS)

#define CHANNEL_LANES (HEAD_DIM / CHANNELS_A_LANE)
#define TOKEN_PARTS_MAX (PASS_TOKENS / PIECE_TOKENS)
#define TOKEN_PARTS \
    (GROUP_LANES / CHANNEL_LANES < TOKEN_PARTS_MAX ? GROUP_LANES / CHANNEL_LANES : TOKEN_PARTS_MAX)

// Channels of K, and pieces of V, that are asked for at once. Such that none remain, on which LLVM 15 crashes.
#define KEYS_AT_ONCE \
    (PART_CHANNELS % 8 == 0 ? 8 : PART_CHANNELS % 4 == 0 ? 4 : PART_CHANNELS % 2 == 0 ? 2 : 1)
#define PIECES_AT_ONCE 2



// Where the weights of a token begin. The strides spread what lanes read or write at once over all banks:
// rows of an odd number of quads, and every eighth one moved by a quad more.
#define WEIGHT_STRIDE (QUADS % 2 ? QUERIES : QUERIES + 4)
#define WEIGHT(t) ((t) * WEIGHT_STRIDE + (t) / PIECE_TOKENS * 4)
#define WEIGHTS WEIGHT(PASS_TOKENS)

// In the end queries and weights make room for the output of this many parts of the tokens at a time.
#define COPIES_MAX (1 + WEIGHTS / (HEAD_DIM * QUERIES))
#define COPIES (COPIES_MAX < TOKEN_PARTS ? COPIES_MAX : TOKEN_PARTS)

#ifdef SOFTCAP
#define QUERY_SCALE (2.0f * LOG2_E * SCALE / SOFTCAP)
#else
#define QUERY_SCALE (LOG2_E * SCALE)
#endif

// Whether the token at `slot` is seen by the query that sees none from `limit` on.
#ifdef WINDOW
#define SEEN(slot, limit) ((slot) < (limit) && (slot) >= (limit) - WINDOW)
#else
#define SEEN(slot, limit) ((slot) < (limit))
#endif

// Row of q and out, of query i of a tile.
static inline size_t query_row(int first_token, int kv_head, int i) {
    return (size_t)(first_token + i / GROUP) * NUM_HEADS + kv_head * GROUP + i % GROUP;
}

// The query tile, transposed to [d][query] and scaled so that scores are logarithms to base 2, or with a soft
// cap what `capped` takes. Zero past the last token.
static inline void load_queries(
    global const float* q, int first_token, int num_queries, int kv_head, local float* query) {
    for (int n = get_local_id(0); n < QUERIES * HEAD_DIM; n += GROUP_LANES) {
        const int i = n / HEAD_DIM, d = n % HEAD_DIM;
        const float x = i < num_queries ? q[query_row(first_token, kv_head, i) * HEAD_DIM + d] : 0.0f;
        query[d * QUERIES + i] = x * QUERY_SCALE;
    }
}

static inline void load_pair(uint bits, float* x) { vstore2(vload_half2(0, (const half*)&bits), 0, x); }

// TOKENS_A_LANE halves at once, out of a private copy: a vload_half from global memory is many small loads.
static inline void load_keys(global const half* k, float* key) {
#if TOKENS_A_LANE == 2
    load_pair(*(global const uint*)k, key);
#elif TOKENS_A_LANE == 4
    const uint2 bits = *(global const uint2*)k;
    load_pair(bits.x, key);
    load_pair(bits.y, key + 2);
#else
    const uint4 bits = *(global const uint4*)k;
    load_pair(bits.x, key);
    load_pair(bits.y, key + 2);
    load_pair(bits.z, key + 4);
    load_pair(bits.w, key + 6);
#endif
}

// weight[t][query] = query . key[t] for the pass whose keys begin at k and of which `count` exist.
// The parts of the channels add theirs one after the other.
static inline void score_pass(
    global const half* k, int count, local const float4* query, local float* weight) {
    const int lane = get_local_id(0);
    const int token = lane % TOKEN_LANES * TOKENS_A_LANE, part = lane / TOKEN_LANES;
    k += token / BLOCK_TOKENS * BLOCK_TOKENS * HEAD_DIM + token % BLOCK_TOKENS;
    k += part * PART_CHANNELS * BLOCK_TOKENS;
    query += part * PART_CHANNELS * QUADS;
    float4 s[TOKENS_A_LANE][QUADS];
    UNROLL for (int t = 0; t < TOKENS_A_LANE; ++t) UNROLL for (int j = 0; j < QUADS; ++j) s[t][j] = 0.0f;
    if (token < count) {
        for (int d0 = 0; d0 < PART_CHANNELS; d0 += KEYS_AT_ONCE) {
            UNROLL for (int d = d0; d < d0 + KEYS_AT_ONCE; ++d) {
                float key[TOKENS_A_LANE];
                load_keys(k + d * BLOCK_TOKENS, key);
                UNROLL for (int j = 0; j < QUADS; ++j) {
                    const float4 x = query[d * QUADS + j];
                    UNROLL for (int t = 0; t < TOKENS_A_LANE; ++t) s[t][j] = fma(x, (float4)key[t], s[t][j]);
                }
            }
        }
    }
    for (int turn = 0; turn < CHANNEL_PARTS; ++turn) {
        if (part == turn) {
            UNROLL for (int t = 0; t < TOKENS_A_LANE; ++t) {
                local float4* row = (local float4*)(weight + WEIGHT(token + t));
                UNROLL for (int j = 0; j < QUADS; ++j) row[j] = turn == 0 ? s[t][j] : row[j] + s[t][j];
            }
        }
        LOCAL_BARRIER;
    }
}

#ifdef SOFTCAP
// SOFTCAP * tanh(z), times log2(e), from s = 2 z log2(e): tanh(z) = 1 - 2 / (1 + exp(2 z)).
static inline float capped(float s) {
    return SOFTCAP * LOG2_E - 2.0f * SOFTCAP * LOG2_E / (1.0f + exp2(fmin(s, 126.0f)));
}
#else
static inline float capped(float s) { return s; }
#endif

// Scores to weights relative to the new maximum, for all queries; QUERY_LANES lanes share one. Tokens from
// the query's `limit` on, or before the window that ends there, are masked: exactly zero, whatever the
// maximum. Leaves in `rescale` the factor by which each query's earlier output shrinks. A lane's running_sum
// is that of its own tokens only.
static inline void soften(local float* weight, int limit, local float* scratch, local float* rescale,
                          float* running_max, float* running_sum) {
    const int lane = get_local_id(0), query = lane % QUERIES, part = lane / QUERIES;
    float s[PASS_TOKENS / QUERY_LANES];
    float top = LOWEST;
    if (part < QUERY_LANES) {
        UNROLL for (int i = 0; i < PASS_TOKENS / QUERY_LANES; ++i) {
            const int t = part + i * QUERY_LANES;
            s[i] = SEEN(t, limit) ? capped(weight[WEIGHT(t) + query]) : LOWEST;
            top = fmax(top, s[i]);
        }
    }
    scratch[lane] = top;
    LOCAL_BARRIER;
    if (part < QUERY_LANES) {
        float maximum = *running_max;
        UNROLL for (int other = 0; other < QUERY_LANES; ++other)
            maximum = fmax(maximum, scratch[other * QUERIES + query]);
        const float shrink = exp2(fmax(*running_max - maximum, -126.0f));
        float sum = 0.0f;
        UNROLL for (int i = 0; i < PASS_TOKENS / QUERY_LANES; ++i) {
            const float seen = s[i] > LOWEST ? exp2(fmax(s[i] - maximum, -126.0f)) : 0.0f;
            weight[WEIGHT(part + i * QUERY_LANES) + query] = seen;
            sum += seen;
        }
        *running_sum = fma(*running_sum, shrink, sum);
        *running_max = maximum;
        if (part == 0) rescale[query] = shrink;
    }
    LOCAL_BARRIER;
}

// acc[c][query] = acc[c][query] * rescale[query] + sum over t of weight[t][query] * value[c][t], for the
// lane's channels and its part of the pass's tokens, of which `count` exist. Neighbouring lanes read pieces
// that lie behind each other.
static inline void add_values(global const half* value, int count, local const float* weight,
                              local const float4* rescale, float4 (*acc)[QUADS]) {
    const int lane = get_local_id(0);
    const int part = lane % TOKEN_PARTS, channel_lane = lane / TOKEN_PARTS;
    if (channel_lane >= CHANNEL_LANES) return;
    value += channel_lane * CHANNELS_A_LANE * CHUNK_TOKENS;
    UNROLL for (int j = 0; j < QUADS; ++j) {
        const float4 shrink = rescale[j];
        UNROLL for (int c = 0; c < CHANNELS_A_LANE; ++c) acc[c][j] *= shrink;
    }
    UNROLL_BY(PIECES_AT_ONCE)
    for (int t = part * PIECE_TOKENS; t < count; t += TOKEN_PARTS * PIECE_TOKENS) {
        float x[CHANNELS_A_LANE][PIECE_TOKENS];
        UNROLL for (int c = 0; c < CHANNELS_A_LANE; ++c) {
            const uint4 bits = *(global const uint4*)(value + c * CHUNK_TOKENS + t);
            load_pair(bits.x, x[c]);
            load_pair(bits.y, x[c] + 2);
            load_pair(bits.z, x[c] + 4);
            load_pair(bits.w, x[c] + 6);
        }
        local const float4* row = (local const float4*)(weight + WEIGHT(t));
        UNROLL for (int i = 0; i < PIECE_TOKENS; ++i) {
            UNROLL for (int j = 0; j < QUADS; ++j) {
                const float4 w = row[i * (WEIGHT_STRIDE / 4) + j];
                UNROLL for (int c = 0; c < CHANNELS_A_LANE; ++c)
                    acc[c][j] = fma(w, (float4)x[c][i], acc[c][j]);
            }
        }
    }
}

// output[copy][d][query], summed over the copies, = the sum of `acc` over the parts of the tokens. Each copy
// takes its parts one after the other.
static inline void join_parts(float4 (*acc)[QUADS], local float4* output) {
    const int lane = get_local_id(0);
    const int part = lane % TOKEN_PARTS, channel_lane = lane / TOKEN_PARTS;
    output += part % COPIES * (HEAD_DIM * QUADS) + channel_lane * (CHANNELS_A_LANE * QUADS);
    for (int turn = 0; turn < (TOKEN_PARTS + COPIES - 1) / COPIES; ++turn) {
        if (part / COPIES == turn && channel_lane < CHANNEL_LANES) {
            UNROLL for (int c = 0; c < CHANNELS_A_LANE; ++c) {
                UNROLL for (int j = 0; j < QUADS; ++j) {
                    const int place = c * QUADS + j;
                    output[place] = turn == 0 ? acc[c][j] : output[place] + acc[c][j];
                }
            }
        }
        LOCAL_BARRIER;
    }
}

// Rows of `to` from the copies of `output`, times each query's scale.
static inline void store_rows(local const float* output, local const float* scale, int first_token,
                              int num_queries, int kv_head, global float* to) {
    for (int n = get_local_id(0); n < num_queries * HEAD_DIM; n += GROUP_LANES) {
        const int i = n / HEAD_DIM, d = n % HEAD_DIM;
        float sum = 0.0f;
        UNROLL for (int copy = 0; copy < COPIES; ++copy)
            sum += output[copy * HEAD_DIM * QUERIES + d * QUERIES + i];
        to[query_row(first_token, kv_head, i) * HEAD_DIM + d] = sum * scale[i];
    }
}

#ifdef CHUNK_ARGUMENTS
// What the launch before left of the tile: the first part of the lanes goes on from it.
static inline void load_partial(global const float* partials, global const float* totals, int first_token,
                                int num_queries, int kv_head, float4 (*acc)[QUADS], float* running_max,
                                float* running_sum) {
    const int lane = get_local_id(0), query = lane % QUERIES;
    if (query < num_queries) {
        const size_t row = query_row(first_token, kv_head, query);
        *running_max = totals[2 * row];
        *running_sum = lane < QUERIES ? totals[2 * row + 1] : 0.0f;
    }
    if (lane % TOKEN_PARTS != 0 || lane / TOKEN_PARTS >= CHANNEL_LANES) return;
    partials += lane / TOKEN_PARTS * CHANNELS_A_LANE;
    UNROLL for (int i = 0; i < QUERIES; ++i) {
        const size_t row = query_row(first_token, kv_head, min(i, num_queries - 1));
        UNROLL for (int c = 0; c < CHANNELS_A_LANE; ++c)
            ((float*)acc[c])[i] = partials[row * HEAD_DIM + c];
    }
}
#endif

COOPERATIVE kernel void attention(global const int* step, global const float* q, global float* out,
                                  global float* partials, CHUNK_PARAMETERS) {
    AT(step, 0); AT(q, 1); AT(out, 2); AT(partials, 3); AT_CHUNKS;
    local float4 query[HEAD_DIM * QUADS + WEIGHTS / 4];
    local float4 rescale[QUADS];
    local float scratch[GROUP_LANES];
    local float* weight = (local float*)(query + HEAD_DIM * QUADS);

    const int position = step[0], num_tokens = step[1], num_splits = step[2], split_chunks = step[3];
    const int first_chunk = step[4];
#ifdef CHUNK_ARGUMENTS
    const int launch_end = launch_chunk + num_splits * split_chunks;
    const int is_last_launch = launch_end * CHUNK_TOKENS >= position + num_tokens;
#else
    const int launch_chunk = first_chunk, is_last_launch = 1;
#endif
    const int lane = get_local_id(0);
    const int kv_head = get_group_id(0);
    const int first_token = get_group_id(1) * TILE;
    const int last_token = min(first_token + TILE, num_tokens) - 1;
    const int num_queries = (last_token + 1 - first_token) * GROUP;
    const int split = get_group_id(2);
    const size_t rows = (size_t)num_tokens * NUM_HEADS;
    global float* totals = partials + num_splits * rows * HEAD_DIM + split * rows * 2;
    partials += split * rows * HEAD_DIM;

    float4 acc[CHANNELS_A_LANE][QUADS];
    UNROLL for (int c = 0; c < CHANNELS_A_LANE; ++c) UNROLL for (int j = 0; j < QUADS; ++j) acc[c][j] = 0.0f;
    float running_max = LOWEST, running_sum = 0.0f;
#ifdef CHUNK_ARGUMENTS
    if (launch_chunk > first_chunk)
        load_partial(partials, totals, first_token, num_queries, kv_head, acc, &running_max, &running_sum);
#endif
    load_queries(q, first_token, num_queries, kv_head, (local float*)query);
    LOCAL_BARRIER;

    const int visible = position + last_token + 1;  // keys that some token of the tile sees
    const int end = min((launch_chunk + (split + 1) * split_chunks) * CHUNK_TOKENS, visible);
    int begin = (launch_chunk + split * split_chunks) * CHUNK_TOKENS;
#ifdef WINDOW  // not what no token of the tile sees
    begin = max(begin, (position + first_token + 1 - WINDOW) / PASS_TOKENS * PASS_TOKENS);
#endif
    for (; begin < end; begin += PASS_TOKENS) {
        const int slot = begin % CHUNK_TOKENS, count = min(end - begin, PASS_TOKENS);
        global const half* k = CHUNK(begin / CHUNK_TOKENS) + (size_t)kv_head * CHUNK_TOKENS * HEAD_DIM;
        const int limit = position + min(first_token + lane % QUERIES / GROUP, last_token) + 1 - begin;
        score_pass(k + slot * HEAD_DIM, count, query, weight);
        soften(weight, limit, scratch, (local float*)rescale, &running_max, &running_sum);
        add_values(k + K_CHUNK_ELEMENTS + slot, count, weight, rescale, acc);
        LOCAL_BARRIER;  // before the next scores
    }

    join_parts(acc, query);
    scratch[lane] = lane < QUERIES * QUERY_LANES ? running_sum : 0.0f;
    LOCAL_BARRIER;
    const int is_whole = num_splits == 1 && is_last_launch;
    if (lane < QUERIES) {
        float sum = 0.0f;
        for (int part = 0; part < QUERY_LANES; ++part) sum += scratch[part * QUERIES + lane];
        ((local float*)rescale)[lane] = is_whole ? 1.0f / sum : 1.0f;
        if (!is_whole && lane < num_queries)
            vstore2((float2)(running_max, sum), query_row(first_token, kv_head, lane), totals);
    }
    LOCAL_BARRIER;
    store_rows((local const float*)query, (local const float*)rescale, first_token, num_queries, kv_head,
               is_whole ? out : partials);
}

// out = the splits' partial results, brought to one maximum. A split that saw nothing of a token has the sum
// 0 and the lowest maximum, so its share is 0.
//
// A work-group is (head, token), the global size in work-groups. A lane takes four channels of part of the
// splits.
#define SPLIT_PARTS (GROUP_LANES / HEAD_QUADS)
COOPERATIVE kernel void attention_merge(global const int* step, global const float* partials,
                                        global float* out PLACES3) {
    AT(step, 0); AT(partials, 1); AT(out, 2);
    local float scratch[GROUP_LANES];
    local float4 sums[GROUP_LANES];
    const int num_tokens = step[1], num_splits = step[2];
    const int lane = get_local_id(0), quad = lane % HEAD_QUADS, part = lane / HEAD_QUADS;
    const size_t rows = (size_t)num_tokens * NUM_HEADS;
    const size_t row = (size_t)get_group_id(1) * NUM_HEADS + get_group_id(0);
    global const float* totals = partials + num_splits * rows * HEAD_DIM + 2 * row;
    partials += row * HEAD_DIM;

    float maximum = LOWEST;
    for (int s = lane; s < num_splits; s += GROUP_LANES) maximum = fmax(maximum, totals[s * rows * 2]);
    maximum = group_max(scratch, maximum);
    float sum = 0.0f;
    float4 acc = 0.0f;
    for (int first = 0; first < num_splits; first += GROUP_LANES) {
        const int count = min(num_splits - first, GROUP_LANES);
        if (lane < count) {
            const float2 of_split = vload2((first + lane) * rows, totals);
            const float share = exp2(fmax(of_split.x - maximum, -126.0f));
            scratch[lane] = share;
            sum = fma(of_split.y, share, sum);
        }
        LOCAL_BARRIER;
        if (part < SPLIT_PARTS) {
            for (int s = part; s < count; s += SPLIT_PARTS)
                acc = fma(vload4(quad, partials + (first + s) * rows * HEAD_DIM), (float4)scratch[s], acc);
        }
        LOCAL_BARRIER;
    }
    const float scale = 1.0f / group_sum(scratch, sum);
    sums[lane] = acc;
    LOCAL_BARRIER;
    if (part == 0) {
        for (int other = 1; other < SPLIT_PARTS; ++other) acc += sums[other * HEAD_QUADS + quad];
        vstore4(acc * scale, quad, out + row * HEAD_DIM);
    }
}
