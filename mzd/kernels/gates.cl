// Owns the formulas of the MLP's gate and of the soft cap; one of GATE_SILU, GATE_GELU_TANH chooses the gate.

#include "vector.cl"

// Both gates are z / (1 + 2^EXPONENT(z)).
#ifdef GATE_GELU_TANH  // 0.5 z (1 + tanh(u)) = z / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3)
#define EXPONENT(z) ((z) * (1.0f + 0.044715f * (z) * (z)) * (-2.0f * 0.797884560802865f * LOG2_E))
#else
#define EXPONENT(z) ((z) * -LOG2_E)
#endif

static inline float gated(float z) { return z / (1.0f + exp2(fmin(EXPONENT(z), 126.0f))); }

// cap * tanh(x / cap), from scale = 2 log2(e) / cap: tanh(z) = 1 - 2 / (1 + exp(2 z)).
static inline float capped(float x, float cap, float scale) {
    return cap - 2.0f * cap / (1.0f + exp2(fmin(x * scale, 126.0f)));
}
