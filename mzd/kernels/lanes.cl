// Owns vectors of LANES floats, 8 or 16: what one register of the device holds, or two narrower ones.
//
// Kernels that use them are declared LANES_KERNEL.

#include "vector.cl"

#if LANES == 16
typedef float16 floatv;
typedef int16 intv;
#define loadv vload16
#define storev vstore16
#define load_halfv vload_half16
#define as_intv as_int16
#define as_floatv as_float16
#define LANE_NUMBERS (int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#else
typedef float8 floatv;
typedef int8 intv;
#define loadv vload8
#define storev vstore8
#define load_halfv vload_half8
#define as_intv as_int8
#define as_floatv as_float8
#define LANE_NUMBERS (int8)(0, 1, 2, 3, 4, 5, 6, 7)
#endif

#if LANES == 16 && defined(__AVX512F__)  // clang splits such vectors unless asked
#define LANES_KERNEL ONE_WORK_ITEM __attribute__((min_vector_width(512))) kernel
#else
#define LANES_KERNEL ONE_WORK_ITEM kernel
#endif

static inline float sumv(floatv x) {
#if LANES == 16
    return sum8(x.lo + x.hi);
#else
    return sum8(x);
#endif
}

static inline float maxv(floatv x) {
#if LANES == 16
    return max8(fmax(x.lo, x.hi));
#else
    return max8(x);
#endif
}

// As exp2_vector.
static inline floatv exp2v(floatv x) { EXP2_BODY(floatv, intv, as_floatv, as_intv) }

// Each step of the sums below joins two vectors: of every pair of blocks (halves, quarters, ...) the sum.
static inline floatv join_halves(floatv a, floatv b) { return (floatv)(a.lo, b.lo) + (floatv)(a.hi, b.hi); }

#if LANES == 16
static inline floatv join_quarters(floatv a, floatv b) {
    return (floatv)(a.s0123, a.s89ab, b.s0123, b.s89ab) + (floatv)(a.s4567, a.scdef, b.s4567, b.scdef);
}
static inline floatv join_pairs(floatv a, floatv b) {
    return (floatv)(a.s01, b.s01, a.s45, b.s45, a.s89, b.s89, a.scd, b.scd) +
           (floatv)(a.s23, b.s23, a.s67, b.s67, a.sab, b.sab, a.sef, b.sef);
}
static inline floatv join_neighbours(floatv a, floatv b) {
    return (floatv)(a.s02, b.s02, a.s46, b.s46, a.s8a, b.s8a, a.sce, b.sce) +
           (floatv)(a.s13, b.s13, a.s57, b.s57, a.s9b, b.s9b, a.sdf, b.sdf);
}
#else
static inline floatv join_pairs(floatv a, floatv b) {
    return (floatv)(a.s01, b.s01, a.s45, b.s45) + (floatv)(a.s23, b.s23, a.s67, b.s67);
}
static inline floatv join_neighbours(floatv a, floatv b) {
    return (floatv)(a.s02, b.s02, a.s46, b.s46) + (floatv)(a.s13, b.s13, a.s57, b.s57);
}
#endif

// Lane l of `sum_each(x)` is the sum over the lanes of x[SUM_SLOT(l)]: the joins shuffle inside quarters of
// four lanes, which costs one instruction each where a shuffle across them costs more, and so transpose.
#define SUM_SLOT(l) ((l) % 4 * (LANES / 4) + (l) / 4)

static inline floatv sum_each(floatv* x) {
    UNROLL for (int i = 0; i < LANES / 2; ++i) x[i] = join_halves(x[2 * i], x[2 * i + 1]);
#if LANES == 16
    UNROLL for (int i = 0; i < 4; ++i) x[i] = join_quarters(x[2 * i], x[2 * i + 1]);
#endif
    UNROLL for (int i = 0; i < 2; ++i) x[i] = join_pairs(x[2 * i], x[2 * i + 1]);
    return join_neighbours(x[0], x[1]);
}
