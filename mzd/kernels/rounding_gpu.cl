// Owns how activations become 8-bit integers: runs of 32, each with a float scale of max |x| / 127.
//
// The meaning, to the bit, is that of matmul_int8.cl.

#include "places.cl"
#include "vector.cl"

#define RUN_COLS 32
#define RUN_WORDS 8    // four columns a word
#define RUN_FIELDS 11  // the words, the scale, scale * sum of columns 0 to 15, scale * sum of columns 16 to 31
#define SCALE_FIELD 8
#define SUM_FIELD 9

// Where a field of a run lies among rounded tokens, [token / 8][field][run][token % 8] words of 4 bytes: what
// lanes that follow each other read, runs that do, is one run of bytes.
#define TOKENS_PER_BLOCK 8
static inline size_t rounded_place(int token, int field, int run, int runs) {
    return (((size_t)(token / TOKENS_PER_BLOCK) * RUN_FIELDS + field) * runs + run) * TOKENS_PER_BLOCK +
           token % TOKENS_PER_BLOCK;
}

// 127 / x, rounded correctly: the division of a GPU may be off by 2 units in the last place, and then what lies
// near the middle between two integers would be rounded otherwise than on a CPU.
static inline float exact_inverse(float x) {
    const float inverse = 127.0f / x;
    return fma(fma(-x, inverse, 127.0f), inverse * (1.0f / 127.0f), inverse);
}

static inline int4 round_quad(float4 x, float inverse) {
    const float rounder = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the integer
    return as_int4(fma(x, (float4)(inverse), (float4)(rounder))) - as_int(rounder);
}

// One run to RUN_FIELDS words. A NaN or an infinity makes such a scale, so that it shows in y: hence the
// maximum of the bits, which order like the magnitudes.
static inline void round_run(global const float *x, int *fields) {
    float4 values[RUN_WORDS];
    int4 bits = 0;
    UNROLL for (int i = 0; i < RUN_WORDS; i++) {
        values[i] = ((global const float4 *)x)[i];
        bits = max(bits, as_int4(values[i]) & INT_MAX);
    }
    const float largest = as_float(max(max(bits.x, bits.y), max(bits.z, bits.w)));
    const float inverse = largest > 0.0f ? exact_inverse(largest) : 0.0f;
    const float scale = largest * (1.0f / 127.0f);
    int4 sums[2] = {0, 0};
    UNROLL for (int i = 0; i < RUN_WORDS; i++) {
        const int4 rounded = round_quad(values[i], inverse);
        sums[i / 4] += rounded;
        fields[i] = as_int(convert_char4(rounded));
    }
    fields[SCALE_FIELD] = as_int(scale);
    UNROLL for (int i = 0; i < 2; i++)
        fields[SUM_FIELD + i] = as_int(scale * (sums[i].x + sums[i].y + sums[i].z + sums[i].w));
}
