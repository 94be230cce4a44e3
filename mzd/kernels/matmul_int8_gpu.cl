// Owns y = W x (or y += W x) for block-quantised weights, activations rounded to 8 bits and few tokens, on
// devices whose work-items run side by side.
//
//   weights     packed (rows, cols), format by -DWEIGHT_*, one with blocks; cols a multiple of those, any rows
//   x           (tokens, cols) float, at a multiple of 16 bytes
//   rounded     tokens as `round_tokens` leaves them (rounding_gpu.cl)
//   y           (tokens, rows) float; nothing else is written
//   lanes       work-items that share a row group (lanes_gpu.cl), at least 2
//   accumulator exact int within a block, float over the blocks of a lane; then added pairwise over the lanes
//   tolerance   max |dy| / max |y| <= 1e-2 against float64, 5e-6 against the same with x rounded first
//
// Two neighbouring lanes take the halves of a row group for 32 columns, so that integers are added before
// they are scaled. One token is rounded by each work-group for itself, which costs less than a launch; more
// tokens once by `round_tokens`, since for 8 of them each work-group would read more of x than of the weights.

#include "weights_gpu.cl"
#include "rounding_gpu.cl"
#include "dot_gpu.cl"
#include "lanes_gpu.cl"

#define RUN_BLOCKS (RUN_COLS / BLOCK_WEIGHTS)  // scales of a run, 1 or 2
#define BLOCK_WORDS (RUN_WORDS / RUN_BLOCKS)

// global size: (tokens, rounded up to TOKENS_PER_BLOCK; runs of a row, rounded up to work-groups). Tokens past
// the end are the last again. Work-items that follow each other write what does.
kernel void round_tokens(global const float *x, global int *rounded, int cols, int tokens PLACES2) {
    AT(x, 0); AT(rounded, 1);
    const int token = get_global_id(0), run = get_global_id(1), runs = cols / RUN_COLS;
    if (run >= runs) return;
    int fields[RUN_FIELDS];
    round_run(x + (size_t)min(token, tokens - 1) * cols + run * RUN_COLS, fields);
    UNROLL for (int i = 0; i < RUN_FIELDS; i++) rounded[rounded_place(token, i, run, runs)] = fields[i];
}

static inline int4 add_words(int4 sums, uint4 quants, int x) {
    return (int4)(add_dot4(quants.x, x, sums.x), add_dot4(quants.y, x, sums.y),
                  add_dot4(quants.z, x, sums.z), add_dot4(quants.w, x, sums.w));
}

// Adds the products of one block. x: [BLOCK_WORDS][tokens] words; x_scales, x_sums: [tokens].
static inline void add_block(
    float4 *results, RowGroup group, uint quad, uint block,
    const int *x, const float *x_scales, const float *x_sums, const int tokens) {
    int4 sums[TOKENS_PER_BLOCK];
    UNROLL for (int t = 0; t < tokens; t++) sums[t] = 0;
    UNROLL for (int w = 0; w < BLOCK_WORDS; w++) {
        const uint4 quants = load_quants(group, quad, block * BLOCK_WEIGHTS + w * 4);
        UNROLL for (int t = 0; t < tokens; t++) sums[t] = add_words(sums[t], quants, x[w * tokens + t]);
    }
    const float4 scale = load_scale(group, quad, block);
    const float4 minimum = load_minimum(group, quad, block, scale);
    UNROLL for (int t = 0; t < tokens; t++) {
        results[t] = fma(convert_float4(sums[t]), scale * x_scales[t], results[t]);
        if (HAS_MINIMUM) results[t] = fma(minimum, (float4)(x_sums[t]), results[t]);
    }
}

// The sum of a run's x that meets minimum `block` of the run.
static inline float block_sum(float first_half, float second_half, int block) {
    return RUN_BLOCKS == 1 ? first_half + second_half : block == 0 ? first_half : second_half;
}

// global size: any number of work-groups, which share the row groups. records: RUN_FIELDS words a run; their
// number is odd, so that lanes that read one field of runs that follow each other meet no bank twice.
kernel COOPERATIVE void multiply_int8_1(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, int lanes, local int *records PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    local float4 exchange[EXCHANGE_FLOAT4S(1)];
    const LaneShare share = lane_share(lanes);
    const int groups = num_row_groups(rows), runs = cols / RUN_COLS, quad = share.lane % 2;
    for (int run = get_local_id(0); run < runs; run += WORK_GROUP) {
        int fields[RUN_FIELDS];
        round_run(x + run * RUN_COLS, fields);
        UNROLL for (int i = 0; i < RUN_FIELDS; i++) records[run * RUN_FIELDS + i] = fields[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int first = share.first; first < groups; first += share.stride) {
        const int number = min(first + share.own, groups - 1);
        const RowGroup group = row_group(weights, number, cols);
        float4 result = 0.0f;
        for (int run = share.lane / 2; run < runs; run += lanes / 2) {
            int x_run[RUN_FIELDS];
            UNROLL for (int i = 0; i < RUN_FIELDS; i++) x_run[i] = records[run * RUN_FIELDS + i];
            UNROLL for (int b = 0; b < RUN_BLOCKS; b++) {
                const float x_scale = as_float(x_run[SCALE_FIELD]);
                const float x_sum =
                    block_sum(as_float(x_run[SUM_FIELD]), as_float(x_run[SUM_FIELD + 1]), b);
                add_block(&result, group, quad, run * RUN_BLOCKS + b, x_run + b * BLOCK_WORDS,
                          &x_scale, &x_sum, 1);
            }
        }
        sum_lanes(&result, exchange, share.lane, lanes, 2, 1);
        if (share.lane < 2 && first + share.own < groups)
            store_quad(result, y, number * GROUP_ROWS + quad * 4, rows, accumulate);
    }
}

// A field of `tokens` tokens, 4 or 8, of one run.
static inline void load_field(int *field, global const int *rounded, const int tokens) {
    UNROLL for (int t = 0; t < tokens; t += 4) vstore4(*(global const int4 *)(rounded + t), 0, field + t);
}

// Adds the products of one run. rounded: the run's first field, of the first token; then one every field_words.
static inline void add_run(
    float4 *results, RowGroup group, uint quad, int run, global const int *rounded, size_t field_words,
    const int tokens) {
    int scales[TOKENS_PER_BLOCK], halves[2][TOKENS_PER_BLOCK];
    load_field(scales, rounded + SCALE_FIELD * field_words, tokens);
    if (HAS_MINIMUM)
        UNROLL for (int i = 0; i < 2; i++)
            load_field(halves[i], rounded + (SUM_FIELD + i) * field_words, tokens);
    UNROLL for (int b = 0; b < RUN_BLOCKS; b++) {
        int x[BLOCK_WORDS * TOKENS_PER_BLOCK];
        float x_scales[TOKENS_PER_BLOCK], x_sums[TOKENS_PER_BLOCK];
        UNROLL for (int w = 0; w < BLOCK_WORDS; w++)
            load_field(x + w * tokens, rounded + (b * BLOCK_WORDS + w) * field_words, tokens);
        UNROLL for (int t = 0; t < tokens; t++) {
            x_scales[t] = as_float(scales[t]);
            x_sums[t] = HAS_MINIMUM ? block_sum(as_float(halves[0][t]), as_float(halves[1][t]), b) : 0.0f;
        }
        add_block(results, group, quad, run * RUN_BLOCKS + b, x, x_scales, x_sums, tokens);
    }
}

// The work of one work-group for `block` tokens from rounded and y on, of which `tokens` are there; `block`
// is known after inlining. exchange: EXCHANGE_FLOAT4S(block).
INLINED void multiply(
    global const uchar *weights, global const int *rounded, global float *y,
    int rows, int cols, int accumulate, int lanes, int tokens, local float4 *exchange, const int block) {
    const LaneShare share = lane_share(lanes);
    const int groups = num_row_groups(rows), runs = cols / RUN_COLS, quad = share.lane % 2;
    for (int first = share.first; first < groups; first += share.stride) {
        const int number = min(first + share.own, groups - 1);
        const RowGroup group = row_group(weights, number, cols);
        float4 results[TOKENS_PER_BLOCK];
        UNROLL for (int t = 0; t < block; t++) results[t] = 0.0f;
        for (int run = share.lane / 2; run < runs; run += lanes / 2)
            add_run(results, group, quad, run, rounded + run * TOKENS_PER_BLOCK,
                    (size_t)runs * TOKENS_PER_BLOCK, block);
        sum_lanes(results, exchange, share.lane, lanes, 2, block);
        if (share.lane < 2 && first + share.own < groups)
            UNROLL for (int t = 0; t < block; t++)
                if (t < tokens)
                    store_quad(results[t], y + (size_t)t * rows, number * GROUP_ROWS + quad * 4, rows,
                               accumulate);
    }
}

// global size: (any number of work-groups, which share the row groups; blocks of as many tokens as the
// kernel's name says, a divisor of TOKENS_PER_BLOCK)
#define MULTIPLY_KERNEL(name, block) \
    kernel COOPERATIVE void name( \
        global const uchar *weights, global const int *rounded, global float *y, \
        int rows, int cols, int accumulate, int lanes, int tokens PLACES3) { \
        AT(weights, 0); AT(rounded, 1); AT(y, 2); \
        local float4 exchange[EXCHANGE_FLOAT4S(block)]; \
        const int first = get_group_id(1) * block; \
        multiply(weights, rounded + rounded_place(first, 0, 0, cols / RUN_COLS), y + (size_t)first * rows, \
                 rows, cols, accumulate, lanes, tokens - first, exchange, block); \
    }

MULTIPLY_KERNEL(multiply_int8_4, 4)
MULTIPLY_KERNEL(multiply_int8_8, 8)
