// Owns what a product of one token multiplies: x, its RMS norm, or its gate, computed as it is read.
//
// Each work-group computes all of it again. That is some dozens of vectors; a launch of its own takes 5 us.

#include "gates.cl"
#include "work_item.cl"

#define PLAIN 0
#define NORMED 1  // x * other / sqrt(mean of x^2 + eps), as norm.cl
#define GATED 2   // act(x) * other, as elementwise.cl

typedef struct {
    global const float *x;
    global const float *other;
    float scale;  // of the norm
} Input;

static inline float norm_scale(global const float *x, int cols, float eps) {
    float16 squares = 0.0f;
    float rest = 0.0f;
    int c = 0;
    for (; c + 16 <= cols; c += 16) {
        const float16 v = vload16(0, x + c);
        squares = fma(v, v, squares);
    }
    for (; c < cols; c++) rest = fma(x[c], x[c], rest);
    return 1.0f / sqrt((sum8(squares.lo + squares.hi) + rest) / cols + eps);
}

static inline float16 exp2_16(float16 x) { EXP2_BODY(float16, int16, as_float16, as_int16) }

// 16 columns from `column` on; the kind is a constant.
INLINED float16 load_inputs(Input input, int column, const int kind) {
    const float16 x = vload16(0, input.x + column);
    if (kind == PLAIN) return x;
    const float16 other = vload16(0, input.other + column);
    if (kind == NORMED) return x * input.scale * other;
    return x / (1.0f + exp2_16(fmin(EXPONENT(x), 126.0f))) * other;
}

INLINED float load_input(Input input, int column, const int kind) {
    const float x = input.x[column];
    if (kind == PLAIN) return x;
    return kind == NORMED ? x * input.scale * input.other[column] : gated(x) * input.other[column];
}
