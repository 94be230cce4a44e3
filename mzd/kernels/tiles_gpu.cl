// Owns the shape of a work-group that multiplies a tile of rows by a tile of tokens, and how it stores results.
//
// -DTILE_ROWS, -DTILE_TOKENS: of the tile; -DLANE_ROWS, -DLANE_TOKENS: of each work-item's part of it, in
// registers. Multiples: of 8, 8, 4 and 4. A work-item's rows are quads that lie TILE_LANE_ROWS quads apart, so
// that neighbours' quads are neighbours in local memory and in y; so are its tokens.

#include "work_item.cl"

#define TILE_LANE_ROWS (TILE_ROWS / LANE_ROWS)        // work-items side by side
#define TILE_LANE_TOKENS (TILE_TOKENS / LANE_TOKENS)
#define TILE_LANES (TILE_LANE_ROWS * TILE_LANE_TOKENS)
#define LANE_ROW_QUADS (LANE_ROWS / 4)
#define LANE_TOKEN_QUADS (LANE_TOKENS / 4)
#define TILED __attribute__((reqd_work_group_size(TILE_LANES, 1, 1)))

// The quads, among those of the tile, that the work-item's quad i of its rows and of its tokens are.
INLINED int row_quad(int i) { return i * TILE_LANE_ROWS + (int)get_local_id(0) % TILE_LANE_ROWS; }
INLINED int token_quad(int i) { return i * TILE_LANE_TOKENS + (int)get_local_id(0) / TILE_LANE_ROWS; }

// Writes a work-item's results, [LANE_TOKENS][LANE_ROW_QUADS], or adds them; what lies in the matrix.
INLINED void store_tile(
    const float4 *results, global float *y, int first_row, int rows, int first_token, int tokens,
    int accumulate) {
    UNROLL for (int t = 0; t < LANE_TOKENS; t++) {
        const int token = first_token + token_quad(t / 4) * 4 + t % 4;
        if (token < tokens)
            UNROLL for (int q = 0; q < LANE_ROW_QUADS; q++)
                store_quad(results[t * LANE_ROW_QUADS + q], y + (size_t)token * rows,
                           first_row + row_quad(q) * 4, rows, accumulate);
    }
}
