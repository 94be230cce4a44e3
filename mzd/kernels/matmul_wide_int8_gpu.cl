// Owns y = W x (or y += W x) for block-quantised weights, activations rounded to 8 bits and many tokens, on
// devices whose work-items run side by side.
//
//   weights     packed (rows, cols), format by -DWEIGHT_*, one with blocks; cols a multiple of those, any rows
//   rounded     (tokens, cols) as `round_tokens` leaves them (rounding_gpu.cl)
//   y           (tokens, rows) float; nothing else is written
//   accumulator exact int within a block, float over the blocks, in the order of the columns
//   tolerance   max |dy| / max |y| <= 1e-2 against float64, 5e-6 against the same with x rounded first
//   work-group  TILE_LANES (tiles_gpu.cl)
//   global size (tiles of rows, tiles of tokens)
//
// 32 columns at a time lie in local memory, as bytes: a quarter of what matmul_wide_gpu.cl moves.

#include "weights_gpu.cl"
#include "rounding_gpu.cl"
#include "dot_gpu.cl"
#include "tiles_gpu.cl"

#define RUN_BLOCKS (RUN_COLS / BLOCK_WEIGHTS)  // scales of a run, 1 or 2
#define BLOCK_WORDS (RUN_WORDS / RUN_BLOCKS)
#define ROW_QUADS (TILE_ROWS / 4)
#define TOKEN_QUADS (TILE_TOKENS / 4)
#define X_FIELDS (HAS_MINIMUM ? RUN_FIELDS : SCALE_FIELD + 1)

// The weights of a run: their bytes [word][quad], and their scales and minima [block][quad].
INLINED void fill_weights(
    local uint4 *w_words, local float4 *w_scales, local float4 *w_minima,
    global const uchar *weights, int first_group, int groups, int run, int cols) {
    for (int i = get_local_id(0); i < ROW_QUADS * RUN_WORDS; i += TILE_LANES) {
        const int own = i / (2 * RUN_WORDS), word = i / 2 % RUN_WORDS, quad = i % 2;
        const RowGroup group = row_group(weights, min(first_group + own, groups - 1), cols);
        w_words[word * ROW_QUADS + own * 2 + quad] = load_quants(group, quad, run * RUN_COLS + word * 4);
    }
    for (int i = get_local_id(0); i < ROW_QUADS * RUN_BLOCKS; i += TILE_LANES) {
        const int tile_quad = i % ROW_QUADS, block = run * RUN_BLOCKS + i / ROW_QUADS;
        const RowGroup group = row_group(weights, min(first_group + tile_quad / 2, groups - 1), cols);
        w_scales[i] = load_scale(group, tile_quad % 2, block);
        w_minima[i] = load_minimum(group, tile_quad % 2, block, w_scales[i]);
    }
}

// The fields of a run of the tile's tokens, [field][quad].
INLINED void fill_tokens(
    local int4 *x_fields, global const int *rounded, int first_token, int tokens, int run, int runs) {
    for (int i = get_local_id(0); i < TOKEN_QUADS * X_FIELDS; i += TILE_LANES) {
        // Past the end, where there may be no block of tokens: the last block again.
        const int last = (tokens - 1) / TOKENS_PER_BLOCK * TOKENS_PER_BLOCK + i % 2 * 4;
        const int token = min(first_token + i % TOKEN_QUADS * 4, last);
        x_fields[i] = *(global const int4 *)(rounded + rounded_place(token, i / TOKEN_QUADS, run, runs));
    }
}

static inline int4 add_words(int4 sums, uint4 quants, int x) {
    return (int4)(add_dot4(quants.x, x, sums.x), add_dot4(quants.y, x, sums.y),
                  add_dot4(quants.z, x, sums.z), add_dot4(quants.w, x, sums.w));
}

// Adds to results the integer sums of a block, scaled.
INLINED void add_scaled(
    float4 *results, const int4 *sums, local const float4 *w_scales, local const float4 *w_minima,
    local const int4 *x_fields, int block) {
    UNROLL for (int t = 0; t < LANE_TOKENS; t++) {
        const int token = token_quad(t / 4) * 4 + t % 4;
        local const float *x_floats = (local const float *)x_fields;
        const float x_scale = x_floats[SCALE_FIELD * TILE_TOKENS + token];
        UNROLL for (int q = 0; q < LANE_ROW_QUADS; q++) {
            float4 *result = results + t * LANE_ROW_QUADS + q;
            const int quad = block * ROW_QUADS + row_quad(q);
            *result = fma(convert_float4(sums[t * LANE_ROW_QUADS + q]), w_scales[quad] * x_scale, *result);
#if HAS_MINIMUM
            float x_sum = x_floats[(SUM_FIELD + block) * TILE_TOKENS + token];
            if (RUN_BLOCKS == 1) x_sum += x_floats[(SUM_FIELD + 1) * TILE_TOKENS + token];
            *result = fma(w_minima[quad], (float4)(x_sum), *result);
#endif
        }
    }
}

INLINED void multiply_tile(
    float4 *results, local const uint4 *w_words, local const float4 *w_scales, local const float4 *w_minima,
    local const int4 *x_fields) {
    UNROLL for (int block = 0; block < RUN_BLOCKS; block++) {
        int4 sums[LANE_TOKENS * LANE_ROW_QUADS];
        UNROLL for (int i = 0; i < LANE_TOKENS * LANE_ROW_QUADS; i++) sums[i] = 0;
        UNROLL for (int word = block * BLOCK_WORDS; word < (block + 1) * BLOCK_WORDS; word++)
            UNROLL for (int t = 0; t < LANE_TOKEN_QUADS; t++) {
                const int4 x = x_fields[word * TOKEN_QUADS + token_quad(t)];
                UNROLL for (int q = 0; q < LANE_ROW_QUADS; q++) {
                    const uint4 quants = w_words[word * ROW_QUADS + row_quad(q)];
                    int4 *own = sums + t * 4 * LANE_ROW_QUADS + q;
                    own[0 * LANE_ROW_QUADS] = add_words(own[0 * LANE_ROW_QUADS], quants, x.x);
                    own[1 * LANE_ROW_QUADS] = add_words(own[1 * LANE_ROW_QUADS], quants, x.y);
                    own[2 * LANE_ROW_QUADS] = add_words(own[2 * LANE_ROW_QUADS], quants, x.z);
                    own[3 * LANE_ROW_QUADS] = add_words(own[3 * LANE_ROW_QUADS], quants, x.w);
                }
            }
        add_scaled(results, sums, w_scales, w_minima, x_fields, block);
    }
}

kernel TILED void multiply_wide_int8(
    global const uchar *weights, global const int *rounded, global float *y,
    int rows, int cols, int accumulate, int tokens PLACES3) {
    AT(weights, 0); AT(rounded, 1); AT(y, 2);
    local uint4 w_words[RUN_WORDS * ROW_QUADS];
    local float4 w_scales[RUN_BLOCKS * ROW_QUADS], w_minima[RUN_BLOCKS * ROW_QUADS];
    local int4 x_fields[RUN_FIELDS * TOKEN_QUADS];
    const int first_row = get_group_id(0) * TILE_ROWS, first_token = get_group_id(1) * TILE_TOKENS;
    const int runs = cols / RUN_COLS;
    float4 results[LANE_TOKENS * LANE_ROW_QUADS];
    UNROLL for (int i = 0; i < LANE_TOKENS * LANE_ROW_QUADS; i++) results[i] = 0.0f;
    for (int run = 0; run < runs; run++) {
        fill_weights(w_words, w_scales, w_minima, weights, first_row / GROUP_ROWS, num_row_groups(rows), run, cols);
        fill_tokens(x_fields, rounded, first_token, tokens, run, runs);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_tile(results, w_words, w_scales, w_minima, x_fields);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    store_tile(results, y, first_row, rows, first_token, tokens, accumulate);
}
