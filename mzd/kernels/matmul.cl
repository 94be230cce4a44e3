// Owns y = W x (or y += W x) for packed weights and float activations: the exact path.
//
//   weights     packed (rows, cols), format by -DWEIGHT_*; cols a multiple of its block, any rows
//   x           (tokens, cols) float
//   y           (tokens, rows) float; nothing else is written
//   accumulator float, one per row and token; the order of the sums does not depend on the work-groups
//   tolerance   max |dy| / max |y| <= 5e-6 against float64
//   work-group  one work-item: a lane of its vectors is a row, so the work-item is the SIMD unit
//
// `gemv` serves one token, `matmul_narrow` a few, `matmul_wide` many; `gemv_normed` and `gemv_gated` take what
// goes before the product into the same launch.
//
// Defines: for gemv_gated GATE_GELU_TANH, or nothing for SiLU.

#include "inputs.cl"
#include "places.cl"
#include "weights.cl"

#if VECTOR_BYTES == 64   // 32 registers of 16 lanes
#define NARROW_TOKENS 8  // 0.67-0.87 of the time of 4 at 8 tokens
#define WIDE_TOKENS 8
#define WIDE_PAIRS 2     // 0.78-0.83 of the time of 1 at 512 tokens
#else                    // a float16 is two registers or more
#define NARROW_TOKENS 4
#define WIDE_TOKENS 4
#define WIDE_PAIRS 1
#endif

#if BLOCK_WEIGHTS == 1  // blocks of one column: keep several in flight
#define UNROLL_BLOCKS _Pragma("unroll 4")
#else
#define UNROLL_BLOCKS
#endif

// The input of one token to local memory: `cols` floats, and where blocks have a minimum the sum of each block.
INLINED void store_input(Input input, local float *x, int cols, const int kind) {
    int k = 0;
    for (; k + 16 <= cols; k += 16) {
        const float16 values = load_inputs(input, k, kind);
        vstore16(values, 0, x + k);
#if HAS_MINIMUM
        const float sum = sum8(values.lo + values.hi);
        local float *block_sum = x + cols + k / BLOCK_WEIGHTS;
        *block_sum = k % BLOCK_WEIGHTS == 0 ? sum : *block_sum + sum;
#endif
    }
    for (; k < cols; k++) x[k] = load_input(input, k, kind);
}

// Unscaled weights are summed within a block and scaled once; a block's minimum meets the sum of its x.
INLINED void multiply_token(
    global const uchar *weights, Input input, global float *y, int rows, int cols, int accumulate,
    local float *x, const int kind) {
    const int blocks = cols / BLOCK_WEIGHTS;
    const int last = first_pair(get_group_id(0) + 1, get_num_groups(0), rows);
    store_input(input, x, cols, kind);
    for (int p = first_pair(get_group_id(0), get_num_groups(0), rows); p < last; p++) {
        const WeightPair pair = weight_pair(weights, p, rows, cols);
        float16 result = 0.0f;
        UNROLL_BLOCKS for (int block = 0; block < blocks; block++) {
            const float16 scale = load_scale(pair, block);
            float16 sums[2] = {0.0f, 0.0f};  // two chains, or the latency of fma shows
            UNROLL for (int step = 0; step < BLOCK_STEPS; step++) {
                float16 w[STEP_WEIGHTS];
                load_step(pair, block, step, w);
                UNROLL for (int j = 0; j < STEP_WEIGHTS; j++) {
                    const float x_k = x[block * BLOCK_WEIGHTS + step_column(step, j)];
                    sums[j & 1] = fma(w[j], (float16)(x_k), sums[j & 1]);
                }
            }
            result = fma(scale, sums[0] + sums[1], result);
#if HAS_MINIMUM
            result = fma(load_minimum(pair, block, scale), (float16)(x[cols + block]), result);
#endif
        }
        store_rows(result, y, p * PAIR_ROWS, rows, accumulate);
    }
}

// global size: number of work-groups, any. x_copy: a float for each column and each block.
kernel WIDE_VECTORS ONE_WORK_ITEM void gemv(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, local float *x_copy PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    multiply_token(weights, (Input){x, x, 1.0f}, y, rows, cols, accumulate, x_copy, PLAIN);
}

// The same of norm(x); norm: (cols,) float.
kernel WIDE_VECTORS ONE_WORK_ITEM void gemv_normed(
    global const uchar *weights, global const float *x, global float *y, global const float *norm,
    int rows, int cols, int accumulate, local float *x_copy, float eps PLACES4) {
    AT(weights, 0); AT(x, 1); AT(y, 2); AT(norm, 3);
    const Input input = {x, norm, norm_scale(x, cols, eps)};
    multiply_token(weights, input, y, rows, cols, accumulate, x_copy, NORMED);
}

// The same of act(x) * up; up: (cols,) float.
kernel WIDE_VECTORS ONE_WORK_ITEM void gemv_gated(
    global const uchar *weights, global const float *x, global float *y, global const float *up,
    int rows, int cols, int accumulate, local float *x_copy PLACES4) {
    AT(weights, 0); AT(x, 1); AT(y, 2); AT(up, 3);
    multiply_token(weights, (Input){x, up, 1.0f}, y, rows, cols, accumulate, x_copy, GATED);
}

// global size: number of work-groups, any. Each weight is unpacked once and used for NARROW_TOKENS tokens.
kernel WIDE_VECTORS ONE_WORK_ITEM void matmul_narrow(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, int tokens PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    const int blocks = cols / BLOCK_WEIGHTS;
    const int last = first_pair(get_group_id(0) + 1, get_num_groups(0), rows);
    for (int p = first_pair(get_group_id(0), get_num_groups(0), rows); p < last; p++) {
        const WeightPair pair = weight_pair(weights, p, rows, cols);
        for (int token = 0; token < tokens; token += NARROW_TOKENS) {
            float16 results[NARROW_TOKENS];
            global const float *x_rows[NARROW_TOKENS];
            UNROLL for (int t = 0; t < NARROW_TOKENS; t++) {
                results[t] = 0.0f;
                x_rows[t] = x + (size_t)min(token + t, tokens - 1) * cols;  // past the end: the last again
            }
            UNROLL_BLOCKS for (int block = 0; block < blocks; block++) {
                const float16 scale = load_scale(pair, block);
                const float16 minimum = load_minimum(pair, block, scale);
                UNROLL for (int step = 0; step < BLOCK_STEPS; step++) {
                    float16 w[STEP_WEIGHTS];
                    load_step(pair, block, step, w);
                    UNROLL for (int j = 0; j < STEP_WEIGHTS; j++) {
                        const float16 weight = scaled(w[j], scale, minimum);
                        const int k = block * BLOCK_WEIGHTS + step_column(step, j);
                        UNROLL for (int t = 0; t < NARROW_TOKENS; t++)
                            results[t] = fma(weight, (float16)(x_rows[t][k]), results[t]);
                    }
                }
            }
            UNROLL for (int t = 0; t < NARROW_TOKENS; t++)
                if (token + t < tokens)
                    store_rows(results[t], y + (size_t)(token + t) * rows, p * PAIR_ROWS, rows, accumulate);
        }
    }
}

#define TILE_PAIRS (TILE_ROWS / PAIR_ROWS)
#define TILE_BLOCKS (TILE_COLS / BLOCK_WEIGHTS)

// Unpacks `blocks` blocks of one pair into every TILE_PAIRS-th vector of the tile.
static inline void fill_tile(local float16 *tile, WeightPair pair, int first_block, int blocks) {
    UNROLL_BLOCKS for (int block = 0; block < blocks; block++) {
        const float16 scale = load_scale(pair, first_block + block);
        const float16 minimum = load_minimum(pair, first_block + block, scale);
        UNROLL for (int step = 0; step < BLOCK_STEPS; step++) {
            float16 w[STEP_WEIGHTS];
            load_step(pair, first_block + block, step, w);
            UNROLL for (int j = 0; j < STEP_WEIGHTS; j++)
                tile[(block * BLOCK_WEIGHTS + step_column(step, j)) * TILE_PAIRS] =
                    scaled(w[j], scale, minimum);
        }
    }
}

// Multiplies WIDE_PAIRS pairs of the tile, from `tile` on, by up to WIDE_TOKENS tokens of x (from column 0
// of the tile on), and adds to y unless `accumulate` is 0.
static inline void multiply_tile(
    local const float16 *tile, global const float *x, global float *y,
    int row, int rows, int cols, int tile_cols, int tokens, int accumulate) {
    float16 results[WIDE_TOKENS][WIDE_PAIRS];
    global const float *x_rows[WIDE_TOKENS];
    UNROLL for (int t = 0; t < WIDE_TOKENS; t++) {
        x_rows[t] = x + (size_t)min(t, tokens - 1) * cols;
        UNROLL for (int p = 0; p < WIDE_PAIRS; p++) results[t][p] = 0.0f;
    }
    _Pragma("unroll 4") for (int k = 0; k < tile_cols; k++) {
        float16 w[WIDE_PAIRS];
        UNROLL for (int p = 0; p < WIDE_PAIRS; p++) w[p] = tile[k * TILE_PAIRS + p];
        UNROLL for (int t = 0; t < WIDE_TOKENS; t++)
            UNROLL for (int p = 0; p < WIDE_PAIRS; p++)
                results[t][p] = fma(w[p], (float16)(x_rows[t][k]), results[t][p]);
    }
    UNROLL for (int t = 0; t < WIDE_TOKENS; t++)
        if (t < tokens)
            UNROLL for (int p = 0; p < WIDE_PAIRS; p++)
                store_rows(results[t][p], y + (size_t)t * rows, row + p * PAIR_ROWS, rows, accumulate);
}

// global size: (row tiles of TILE_ROWS, token blocks of block_tokens). A tile of weights is unpacked to
// local memory as [column][row] and used for all tokens of the block, TILE_COLS columns at a time.
kernel WIDE_VECTORS ONE_WORK_ITEM void matmul_wide(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, int tokens, int block_tokens PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    local float16 tile[TILE_COLS * TILE_PAIRS];
    const int blocks = cols / BLOCK_WEIGHTS;
    const int tile_pair = get_group_id(0) * TILE_PAIRS;
    const int pairs = min(TILE_PAIRS, num_pairs(rows) - tile_pair);
    const int first_token = get_group_id(1) * block_tokens;
    const int last_token = min(tokens, first_token + block_tokens);
    for (int block = 0; block < blocks; block += TILE_BLOCKS) {
        const int tile_blocks = min(TILE_BLOCKS, blocks - block);
        for (int p = 0; p < pairs; p++)
            fill_tile(tile + p, weight_pair(weights, tile_pair + p, rows, cols), block, tile_blocks);
        for (int token = first_token; token < last_token; token += WIDE_TOKENS)
            for (int p = 0; p < pairs; p += WIDE_PAIRS)
                multiply_tile(
                    tile + p, x + (size_t)token * cols + block * BLOCK_WEIGHTS, y + (size_t)token * rows,
                    (tile_pair + p) * PAIR_ROWS, rows, cols, tile_blocks * BLOCK_WEIGHTS,
                    last_token - token, accumulate || block > 0);
    }
}
