// Owns y = W x (or y += W x) for packed weights, float activations and many tokens, on devices whose work-items
// run side by side: the exact path that is bound by arithmetic.
//
//   weights     packed (rows, cols), format by -DWEIGHT_*; cols a multiple of its block, any rows
//   x           (tokens, cols) float; for block types at a multiple of 16 bytes
//   y           (tokens, rows) float; nothing else is written
//   accumulator float, in the order of the columns
//   tolerance   max |dy| / max |y| <= 5e-6 against float64
//   work-group  TILE_LANES (tiles_gpu.cl)
//   global size (tiles of rows, tiles of tokens)
//
// TILE_COLS columns at a time, the weights of the tile are unpacked once and x is transposed, into local
// memory, so that each work-item reads quads of rows and of tokens for an outer product in registers.

#include "places.cl"
#include "weights_gpu.cl"
#include "tiles_gpu.cl"

#ifndef TILE_COLS  // a divisor of 32, the smallest number of columns of the block types
#define TILE_COLS 32
#endif
#define W_STRIDE (TILE_ROWS + 4)    // floats; the quad more spreads columns over the banks
#define X_STRIDE (TILE_TOKENS + 4)

#if BLOCK_WEIGHTS == 1

#define GROUP_PIECES TILE_COLS

// Unpacks piece `piece` of a row group's tile, from column `column` of the matrix on, to w_tile: [column][row].
static inline void fill_piece(local float *w_tile, RowGroup group, int piece, int column, int cols) {
    float4 w[2] = {0.0f, 0.0f};
    if (column + piece < cols) load_column(group, column + piece, w);
    local float4 *place = (local float4 *)(w_tile + piece * W_STRIDE);
    place[0] = w[0];
    place[1] = w[1];
}

#else

#define GROUP_PIECES (2 * TILE_COLS / PIECE_COLS)

static inline void fill_piece(local float *w_tile, RowGroup group, int piece, int column, int cols) {
    const int quad = piece % 2, tile_column = piece / 2 * PIECE_COLS;
    const uint4 quants = load_quants(group, quad, column + tile_column);
    const float4 scale = load_scale(group, quad, (column + tile_column) / BLOCK_WEIGHTS);
    const float4 minimum = load_minimum(group, quad, (column + tile_column) / BLOCK_WEIGHTS, scale);
    UNROLL for (int j = 0; j < PIECE_COLS; j++) {
        const float4 w = quant_column(quants, j);
        *(local float4 *)(w_tile + (tile_column + j) * W_STRIDE + quad * 4) =
            HAS_MINIMUM ? fma(w, scale, minimum) : w * scale;
    }
}

#endif

INLINED void fill_weights(
    local float *w_tile, global const uchar *weights, int first_group, int groups, int column, int cols) {
    for (int i = get_local_id(0); i < TILE_ROWS / GROUP_ROWS * GROUP_PIECES; i += TILE_LANES) {
        const int own = i / GROUP_PIECES;
        const RowGroup group = row_group(weights, min(first_group + own, groups - 1), cols);
        fill_piece(w_tile + own * GROUP_ROWS, group, i % GROUP_PIECES, column, cols);
    }
}

// Four columns of a token, zeros past the last.
static inline float4 load_x(global const float *x, int column, int cols) {
#if BLOCK_WEIGHTS == 1
    float4 result = 0.0f;
    if (column < cols) result.x = x[column];
    if (column + 1 < cols) result.y = x[column + 1];
    if (column + 2 < cols) result.z = x[column + 2];
    if (column + 3 < cols) result.w = x[column + 3];
    return result;
#else
    return *(global const float4 *)(x + column);
#endif
}

// x of the tile to [column][token]. Two work-items take the halves of 32 bytes of one token, those that follow
// the next tokens: so they read whole sectors, and write to different banks.
INLINED void fill_tokens(
    local float *x_tile, global const float *x, int first_token, int tokens, int column, int cols) {
    for (int i = get_local_id(0); i < TILE_TOKENS * (TILE_COLS / 4); i += TILE_LANES) {
        const int token = i / 2 % TILE_TOKENS, tile_column = (i / 2 / TILE_TOKENS * 2 + i % 2) * 4;
        const size_t x_row = (size_t)min(first_token + token, tokens - 1) * cols;
        const float4 values = load_x(x + x_row, column + tile_column, cols);
        local float *place = x_tile + tile_column * X_STRIDE + token;
        place[0] = values.x;
        place[X_STRIDE] = values.y;
        place[2 * X_STRIDE] = values.z;
        place[3 * X_STRIDE] = values.w;
    }
}

// Adds the outer products of the tile's columns.
INLINED void multiply_tile(float4 *results, local const float *w_tile, local const float *x_tile) {
    UNROLL for (int k = 0; k < TILE_COLS; k++) {
        float4 w[LANE_ROW_QUADS];
        UNROLL for (int q = 0; q < LANE_ROW_QUADS; q++)
            w[q] = *(local const float4 *)(w_tile + k * W_STRIDE + row_quad(q) * 4);
        UNROLL for (int t = 0; t < LANE_TOKEN_QUADS; t++) {
            const float4 x = *(local const float4 *)(x_tile + k * X_STRIDE + token_quad(t) * 4);
            UNROLL for (int q = 0; q < LANE_ROW_QUADS; q++) {
                float4 *own = results + t * 4 * LANE_ROW_QUADS + q;
                own[0 * LANE_ROW_QUADS] = fma(w[q], (float4)(x.x), own[0 * LANE_ROW_QUADS]);
                own[1 * LANE_ROW_QUADS] = fma(w[q], (float4)(x.y), own[1 * LANE_ROW_QUADS]);
                own[2 * LANE_ROW_QUADS] = fma(w[q], (float4)(x.z), own[2 * LANE_ROW_QUADS]);
                own[3 * LANE_ROW_QUADS] = fma(w[q], (float4)(x.w), own[3 * LANE_ROW_QUADS]);
            }
        }
    }
}

kernel TILED void multiply_wide(
    global const uchar *weights, global const float *x, global float *y,
    int rows, int cols, int accumulate, int tokens PLACES3) {
    AT(weights, 0); AT(x, 1); AT(y, 2);
    local float w_tile[TILE_COLS * W_STRIDE] __attribute__((aligned(16)));
    local float x_tile[TILE_COLS * X_STRIDE] __attribute__((aligned(16)));
    const int first_row = get_group_id(0) * TILE_ROWS, first_token = get_group_id(1) * TILE_TOKENS;
    float4 results[LANE_TOKENS * LANE_ROW_QUADS];
    UNROLL for (int i = 0; i < LANE_TOKENS * LANE_ROW_QUADS; i++) results[i] = 0.0f;
    for (int column = 0; column < cols; column += TILE_COLS) {
        fill_weights(w_tile, weights, first_row / GROUP_ROWS, num_row_groups(rows), column, cols);
        fill_tokens(x_tile, x, first_token, tokens, column, cols);
        barrier(CLK_LOCAL_MEM_FENCE);
        multiply_tile(results, w_tile, x_tile);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    store_tile(results, y, first_row, rows, first_token, tokens, accumulate);
}
