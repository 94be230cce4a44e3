// Owns what works on each activation by itself.
//
// Defines, for gated_mul: one of GATE_SILU, GATE_GELU_TANH.

#include "gates.cl"
#include "places.cl"

#define BLOCK 512  // elements a work-item: some 0.3 us of work, so that one token still spreads over cores

// gate[t][c] = act(gate[t][c]) * up[t][c], with act the SiLU, z / (1 + exp(-z)), or the GELU in its tanh form
//
//   gate, up  (count,) float: all tokens in a row, any count
//
// One work-item for BLOCK elements (global size: count / BLOCK, rounded up). Tolerance: 1e-6 relative for
// SiLU; 1e-6 of |z| for GELU, whose exponent grows with z^3.
ONE_WORK_ITEM kernel void gated_mul(global float* gate, global const float* up, const int count PLACES2) {
    AT(gate, 0); AT(up, 1);
    const int begin = get_global_id(0) * BLOCK;
    const int end = min(begin + BLOCK, count);
    int i = begin;
    for (; i + 8 <= end; i += 8) {
        const float8 z = vload8(0, gate + i);
        // exp2_vector takes at most 127: beyond, the gate is below 1e-36 anyway.
        const float8 e = exp2_vector(fmin(EXPONENT(z), 126.0f));
        vstore8(z / (1.0f + e) * vload8(0, up + i), 0, gate + i);
    }
    for (; i < end; ++i) gate[i] = gated(gate[i]) * up[i];
}

// x[i] = cap * tanh(x[i] / cap)
//
//   x  (count,) float, any count
//
// One work-item for BLOCK elements (global size: count / BLOCK, rounded up). Tolerance: 1e-6 of the cap.
ONE_WORK_ITEM kernel void soft_cap(global float* x, const int count, const float cap PLACES1) {
    AT(x, 0);
    const int begin = get_global_id(0) * BLOCK;
    const int end = min(begin + BLOCK, count);
    const float scale = 2.0f * LOG2_E / cap;
    int i = begin;
    for (; i + 8 <= end; i += 8) {
        const float8 e = exp2_vector(fmin(vload8(0, x + i) * scale, 126.0f));
        vstore8(cap - 2.0f * cap / (1.0f + e), 0, x + i);
    }
    for (; i < end; ++i) x[i] = capped(x[i], cap, scale);
}
