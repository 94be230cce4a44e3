// Owns RMS normalisation for devices whose work-groups cooperate through local memory.

#include "places.cl"
#include "work_group.cl"

#ifdef ACCUMULATE
#define STORE(v, y) *(y) += (v)
#else
#define STORE(v, y) *(y) = (v)
#endif

// As rms_norm of norm.cl. One work-group a token (global size: tokens * GROUP_LANES); sums in float.
// Tolerance: 1e-6 of the largest |y|.
COOPERATIVE kernel void rms_norm(global const float* x, global const float* weight, global float* y,
                                 const int cols, const float eps PLACES3) {
    AT(x, 0); AT(weight, 1); AT(y, 2);
    local float scratch[GROUP_LANES];
    const int lane = get_local_id(0);
    const size_t row = (size_t)get_group_id(0) * cols;
    float squares = 0.0f;
    for (int c = lane; c < cols; c += GROUP_LANES) squares = fma(x[row + c], x[row + c], squares);
    const float scale = 1.0f / sqrt(group_sum(scratch, squares) / cols + eps);
    for (int c = lane; c < cols; c += GROUP_LANES) STORE(x[row + c] * scale * weight[c], y + row + c);
}
