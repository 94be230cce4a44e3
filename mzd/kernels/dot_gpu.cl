// Owns the product of four pairs of signed bytes, in one instruction where there is a way to ask for it.
//
// -DPORTABLE_DOT asks for none, for compilers that say they have what they cannot compile.

#if defined(__opencl_c_integer_dot_product_input_4x8bit_packed) && !defined(PORTABLE_DOT)

static inline int add_dot4(uint a, int b, int sum) { return sum + dot_4x8packed_ss_int(a, (uint)b); }

#elif defined(__NV_CL_C_VERSION) && !defined(PORTABLE_DOT)

// The compiler finds it by itself in the products below, but not where it knows that a byte is a nibble: Q4_1 took
// 0.74 of the time this way, at 8 tokens as at 512.
static inline int add_dot4(uint a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}

#else

static inline int add_dot4(uint a, int b, int sum) {
    const char4 left = as_char4(a), right = as_char4(b);
    return sum + left.x * right.x + left.y * right.y + left.z * right.z + left.w * right.w;
}

#endif
