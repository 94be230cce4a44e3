// Owns y = W x (or y += W x) for packed weights, float activations and few tokens, on devices whose work-items
// run side by side: the exact path that reads each weight once.
//
//   weights     packed (rows, cols), format by -DWEIGHT_*; cols a multiple of its block, any rows
//   x           (tokens, cols) float; for block types at a multiple of 16 bytes
//   y           (tokens, rows) float; nothing else is written
//   lanes       work-items that share a row group (lanes_gpu.cl), at least 2
//   accumulator float, for each lane, row and token; then added pairwise over the lanes
//   tolerance   max |dy| / max |y| <= 5e-6 against float64
//   global size (any number of work-groups, which share the row groups; blocks of as many tokens as the
//               kernel's name says)
//
// A work-item takes all 8 rows of a few columns, for up to 4 tokens; of 8 tokens neighbours take 4 each, since
// 64 sums a work-item leave room for too few work-items.

#include "places.cl"
#include "weights_gpu.cl"
#include "lanes_gpu.cl"

#define LANE_TOKENS_MAX 4
#define PIECES_IN_FLIGHT _Pragma("unroll 4")  // 2 and 1 took up to 1.15 times as long

#if BLOCK_WEIGHTS == 1

// Adds the products of one column. sums: [token][quad]; x_offsets: of each token's row in x.
static inline void add_columns(
    float4 *sums, RowGroup group, uint column, global const float *x, const int *x_offsets, const int tokens) {
    float4 w[2];
    load_column(group, column, w);
    UNROLL for (int t = 0; t < tokens; t++) {
        const float x_k = x[x_offsets[t] + column];
        UNROLL for (int q = 0; q < 2; q++) sums[2 * t + q] = fma(w[q], (float4)(x_k), sums[2 * t + q]);
    }
}

#else

static inline float4 weighted(const float4 *w, float4 x, float4 sum) {
    sum = fma(w[0], (float4)(x.x), sum);
    sum = fma(w[1], (float4)(x.y), sum);
    sum = fma(w[2], (float4)(x.z), sum);
    return fma(w[3], (float4)(x.w), sum);
}

// Adds the products of four columns. sums: [token][quad]; x_offsets: of each token's row in x.
// For one token it is cheaper to scale the sum, for more to scale the weights.
static inline void add_columns(
    float4 *sums, RowGroup group, uint column, global const float *x, const int *x_offsets, const int tokens) {
    float4 x4[LANE_TOKENS_MAX];
    UNROLL for (int t = 0; t < tokens; t++) x4[t] = *(global const float4 *)(x + x_offsets[t] + column);
    UNROLL for (int q = 0; q < 2; q++) {
        const uint4 quants = load_quants(group, q, column);
        const float4 scale = load_scale(group, q, column / BLOCK_WEIGHTS);
        const float4 minimum = load_minimum(group, q, column / BLOCK_WEIGHTS, scale);
        float4 w[4];
        UNROLL for (int j = 0; j < 4; j++) w[j] = quant_column(quants, j);
        if (tokens == 1) {
            sums[q] = fma(scale, weighted(w, x4[0], 0.0f), sums[q]);
            if (HAS_MINIMUM)
                sums[q] = fma(minimum, (float4)(x4[0].x + x4[0].y + x4[0].z + x4[0].w), sums[q]);
        } else {
            UNROLL for (int j = 0; j < 4; j++) w[j] = HAS_MINIMUM ? fma(w[j], scale, minimum) : w[j] * scale;
            UNROLL for (int t = 0; t < tokens; t++) sums[2 * t + q] = weighted(w, x4[t], sums[2 * t + q]);
        }
    }
}

#endif

// The work of one work-group for `shares` times `block` tokens from x and y on, of which `tokens` are there;
// both constants are known after inlining. exchange: EXCHANGE_FLOAT4S(2 * block).
INLINED void multiply(
    global const uchar *weights, global const float *x, global float *y, int rows, int cols, int accumulate,
    int lanes, int tokens, local float4 *exchange, const int block, const int shares) {
    const LaneShare share = lane_share(lanes);
    const int groups = num_row_groups(rows), pieces = cols / PIECE_COLS;
    const int first_token = share.lane % shares * block;
    int x_offsets[LANE_TOKENS_MAX];  // of tokens past the end: the last again
    UNROLL for (int t = 0; t < block; t++) x_offsets[t] = min(first_token + t, tokens - 1) * cols;
    for (int first = share.first; first < groups; first += share.stride) {
        const int number = min(first + share.own, groups - 1);
        const RowGroup group = row_group(weights, number, cols);
        float4 sums[2 * LANE_TOKENS_MAX];
        UNROLL for (int i = 0; i < 2 * block; i++) sums[i] = 0.0f;
        PIECES_IN_FLIGHT for (int piece = share.lane / shares; piece < pieces; piece += lanes / shares)
            add_columns(sums, group, piece * PIECE_COLS, x, x_offsets, block);
        sum_lanes(sums, exchange, share.lane, lanes, shares, 2 * block);
        if (share.lane < shares && first + share.own < groups)
            UNROLL for (int i = 0; i < 2 * block; i++)
                if (first_token + i / 2 < tokens)
                    store_quad(sums[i], y + (size_t)(first_token + i / 2) * rows,
                               number * GROUP_ROWS + i % 2 * 4, rows, accumulate);
    }
}

#define MULTIPLY_KERNEL(name, block, shares) \
    kernel COOPERATIVE void name( \
        global const uchar *weights, global const float *x, global float *y, \
        int rows, int cols, int accumulate, int lanes, int tokens PLACES3) { \
        AT(weights, 0); AT(x, 1); AT(y, 2); \
        local float4 exchange[EXCHANGE_FLOAT4S(2 * block)]; \
        const int first = (int)get_group_id(1) * block * shares; \
        multiply(weights, x + (size_t)first * cols, y + (size_t)first * rows, \
                 rows, cols, accumulate, lanes, tokens - first, exchange, block, shares); \
    }

MULTIPLY_KERNEL(multiply_1, 1, 1)
MULTIPLY_KERNEL(multiply_4, 4, 1)
MULTIPLY_KERNEL(multiply_8, 4, 2)
