// Owns how kernels of the GPU class read packed weights: in loads of 16 bytes, which lanes that follow each other
// take from bytes that do.
//
// Rows 0 to 3 and 4 to 7 of a row group are its *quads*: 16 bytes of a payload of 4-byte words are a word of
// each row of a quad. Of the block types a load gives 4 columns of a quad (words of nibbles serve two loads,
// which are the same lane's or a neighbour's: memory is read once).

#include "vector.cl"
#include "weight_format.cl"

#if BLOCK_WEIGHTS == 1
#define PIECE_COLS 1
#else
#define PIECE_COLS 4
#endif

typedef struct {
    global const uchar *headers;
    global const uint4 *payload;
} RowGroup;

static inline RowGroup row_group(global const uchar *weights, int group, int cols) {
    RowGroup result;
    result.headers = weights + group * group_bytes(cols);
    result.payload = (global const uint4 *)(result.headers + payload_offset(cols));
    return result;
}

static inline int num_row_groups(int rows) { return (rows + GROUP_ROWS - 1) / GROUP_ROWS; }

// From a private copy: a load of halves from global memory took 1.24 times as long on an NVIDIA GPU.
static inline float4 unpack_halves(uint2 bits) {
    return vload_half4(0, (const half *)&bits);
}

#if BLOCK_WEIGHTS == 1

// One column of both quads.
static inline void load_column(RowGroup group, uint column, float4 *w) {
#if defined(WEIGHT_F32)
    w[0] = as_float4(group.payload[2 * column]);
    w[1] = as_float4(group.payload[2 * column + 1]);
#else
    const uint4 bits = group.payload[column];
#if defined(WEIGHT_F16)
    w[0] = unpack_halves(bits.xy);
    w[1] = unpack_halves(bits.zw);
#else
    w[0] = as_float4((uint4)(bits.x << 16, bits.x & 0xffff0000u, bits.y << 16, bits.y & 0xffff0000u));
    w[1] = as_float4((uint4)(bits.z << 16, bits.z & 0xffff0000u, bits.w << 16, bits.w & 0xffff0000u));
#endif
#endif
}

#else

static inline uint4 load_words(RowGroup group, uint quad, uint word) {
    return group.payload[word * 2 + quad];
}

// Columns `column` to `column` + 3 of a quad, `column` a multiple of 4: the bytes of each row's component.
static inline uint4 load_quants(RowGroup group, uint quad, uint column) {
#if defined(WEIGHT_Q8_0)
    return load_words(group, quad, column / 4);
#elif SCALE_BYTES == 0
    return load_words(group, quad, column / 32 * 4 + column / 4 % 4) >> column / 16 % 2 * 4 & 0x0f0f0f0fu;
#elif defined(WEIGHT_Q4_K)
    const uint run = column / 32;
    return load_words(group, quad, run / 2 * 8 + column / 4 % 8) >> run % 2 * 4 & 0x0f0f0f0fu;
#elif defined(WEIGHT_Q5_K)
    const uint base = column / 256 * SUPER_WORDS, run = column / 32 % 8, place = column / 4 % 8;
    const uint4 low = load_words(group, quad, base + 8 + run / 2 * 8 + place) >> run % 2 * 4;
    const uint4 high = load_words(group, quad, base + place) >> run;
    return (low & 0x0f0f0f0fu) | (high & 0x01010101u) << 4;
#else
    const uint base = column / 128 * (SUPER_WORDS / 2), run = column / 32 % 4, place = column / 4 % 8;
    const uint4 low = load_words(group, quad, base + run % 2 * 8 + place) >> run / 2 * 4;
    const uint4 high = load_words(group, quad, base + 16 + place) >> run * 2;
    return (low & 0x0f0f0f0fu) | (high & 0x03030303u) << 4;
#endif
}

// The halves `field` of a header, of a quad's rows.
static inline float4 load_halves(RowGroup group, uint quad, uint header, uint field) {
    const uint offset = header * HEADER_BYTES + field * (GROUP_ROWS * 2) + quad * 8;
    return unpack_halves(*(global const uint2 *)(group.headers + offset));
}

#if SCALE_BYTES > 0
// The bytes `index` of a header's sub-blocks, of a quad's rows.
static inline uint load_scale_bytes(RowGroup group, uint quad, uint header, uint index) {
    const uint offset = header * HEADER_BYTES + GROUP_ROWS * (2 * HEADER_FIELDS + index) + quad * 4;
    return *(global const uint *)(group.headers + offset);
}
#endif

// A block's weights are scale * quant + minimum.
static inline float4 load_scale(RowGroup group, uint quad, uint block) {
#if SCALE_BYTES == 0
    return load_halves(group, quad, block, 0);
#else
    const uint header = block / SUPER_BLOCKS, index = block % SUPER_BLOCKS;
    const float4 scale = load_halves(group, quad, header, 0);
#if defined(WEIGHT_Q6_K)
    return scale * convert_float4(as_char4(load_scale_bytes(group, quad, header, index)));
#else
    return scale * convert_float4(as_uchar4(load_scale_bytes(group, quad, header, 2 * index)));
#endif
#endif
}

static inline float4 load_minimum(RowGroup group, uint quad, uint block, float4 scale) {
#if defined(MINIMUM_SCALES)
    return MINIMUM_SCALES * scale;
#elif HEADER_FIELDS < 2
    return 0.0f;
#elif SCALE_BYTES == 0
    return load_halves(group, quad, block, 1);
#else
    const uint header = block / SUPER_BLOCKS, index = block % SUPER_BLOCKS;
    const float4 minimum = load_halves(group, quad, header, 1);
    return -minimum * convert_float4(as_uchar4(load_scale_bytes(group, quad, header, 2 * index + 1)));
#endif
}

// Column `column` + j of a piece, of its four rows, not scaled.
static inline float4 quant_column(uint4 quants, int j) {
    const uint shift = 8 * j;
#if defined(WEIGHT_Q8_0)
    return convert_float4(as_int4(quants << 24 - shift) >> 24);
#else
    return convert_float4(quants >> shift & 255u);
#endif
}

#endif

// Writes the results of rows row .. row + 3 of one token, those that the matrix has; or adds them.
static inline void store_quad(float4 result, global float *y, int row, int rows, int accumulate) {
    const float values[4] = {result.x, result.y, result.z, result.w};
    UNROLL for (int i = 0; i < 4; i++)
        if (row + i < rows) y[row + i] = accumulate ? y[row + i] + values[i] : values[i];
}
