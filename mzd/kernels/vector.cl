// Owns the float8 helpers that several kernels share.

#define UNROLL _Pragma("unroll")
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(times) PRAGMA(unroll times)
#define ONE_WORK_ITEM __attribute__((reqd_work_group_size(1, 1, 1)))

#define LOG2_E 1.44269504088896341f
#define LOWEST -3.0e38f  // stands for -infinity, which -cl-finite-math-only miscompiles on some devices

// Ask for the cache line at `pointer`; through size_t because the builtin refuses a global pointer.
#define PREFETCH_LINE(pointer) __builtin_prefetch((const void*)(size_t)(pointer))

// Sum of the eight lanes.
static inline float sum8(float8 x) {
    float4 four = x.lo + x.hi;
    float2 two = four.lo + four.hi;
    return two.x + two.y;
}

// Largest of the eight lanes.
static inline float max8(float8 x) {
    float4 four = fmax(x.lo, x.hi);
    float2 two = fmax(four.lo, four.hi);
    return fmax(two.x, two.y);
}

// 2^x for x <= 127, relative error < 2e-7; 2^-126, which adds nothing to any sum here, for all x below.
// A library's exp2 is a call per lane on some drivers. Rounding by 1.5 * 2^23 leaves the integer part in
// the low mantissa bits, from where the shift moves it into the exponent. The polynomial is minimax.
#define EXP2_BODY(floats, ints, as_floats, as_ints)                \
    const floats rounder = 12582912.0f;                            \
    x = fmax(x, (floats)(-126.0f));                                \
    const floats rounded = x + rounder;                            \
    const floats f = x - (rounded - rounder); /* in [-0.5, 0.5] */ \
    floats p = fma((floats)(1.32647203e-3f), f, (floats)(9.67151299e-3f)); \
    p = fma(p, f, (floats)(5.55073358e-2f));                       \
    p = fma(p, f, (floats)(2.40222424e-1f));                       \
    p = fma(p, f, (floats)(6.93147004e-1f));                       \
    p = fma(p, f, (floats)(1.0f));                                 \
    return as_floats(as_ints(p) + (as_ints(rounded) << 23));

static inline float8 exp2_vector(float8 x) { EXP2_BODY(float8, int8, as_float8, as_int8) }
