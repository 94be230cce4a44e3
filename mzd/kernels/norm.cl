// Owns RMS normalisation.

#include "places.cl"
#include "vector.cl"

#ifdef ACCUMULATE
#define STORE8(v, y) vstore8(vload8(0, y) + (v), 0, y)
#define STORE(v, y) *(y) += (v)
#else
#define STORE8(v, y) vstore8(v, 0, y)
#define STORE(v, y) *(y) = (v)
#endif

// y[t][c] = x[t][c] * weight[c] / sqrt(mean of x[t]^2 + eps); with ACCUMULATE defined it is added to y.
//
//   x, y    (tokens, cols) float, row-major; may be the same unless ACCUMULATE
//   weight  (cols,) float
//
// One work-item a token (global size: tokens). Sums in float, eight at a time. Tolerance: 1e-6 of the
// largest |y|.
ONE_WORK_ITEM kernel void rms_norm(global const float* x, global const float* weight, global float* y,
                                   const int cols, const float eps PLACES3) {
    AT(x, 0); AT(weight, 1); AT(y, 2);
    const size_t row = (size_t)get_global_id(0) * cols;
    const int whole = cols & ~7;
    float8 squares = 0.0f;
    float rest = 0.0f;
    for (int c = 0; c < whole; c += 8) {
        const float8 v = vload8(0, x + row + c);
        squares = fma(v, v, squares);
    }
    for (int c = whole; c < cols; ++c) rest = fma(x[row + c], x[row + c], rest);

    const float scale = 1.0f / sqrt((sum8(squares) + rest) / cols + eps);
    for (int c = 0; c < whole; c += 8) {
        STORE8(vload8(0, x + row + c) * scale * vload8(0, weight + c), y + row + c);
    }
    for (int c = whole; c < cols; ++c) STORE(x[row + c] * scale * weight[c], y + row + c);
}
