// Owns what works on each activation by itself.

#include "vector.cl"

#define BLOCK 512  // elements a work-item: some 0.3 us of work, so that one token still spreads over cores

// gate[t][c] = silu(gate[t][c]) * up[t][c], with silu(z) = z / (1 + exp(-z))
//
//   gate, up  (count,) float: all tokens in a row, any count
//
// One work-item for BLOCK elements (global size: count / BLOCK, rounded up). Tolerance: 1e-6 relative.
ONE_WORK_ITEM kernel void silu_mul(global float* gate, global const float* up, const int count) {
    const int begin = get_global_id(0) * BLOCK;
    const int end = min(begin + BLOCK, count);
    int i = begin;
    for (; i + 8 <= end; i += 8) {
        const float8 z = vload8(0, gate + i);
        // exp2_vector takes at most 127: beyond, silu is below 1e-36 anyway.
        const float8 e = exp2_vector(fmin(z * -LOG2_E, 126.0f));
        vstore8(z / (1.0f + e) * vload8(0, up + i), 0, gate + i);
    }
    for (; i < end; ++i) gate[i] = gate[i] / (1.0f + exp(-gate[i])) * up[i];
}
