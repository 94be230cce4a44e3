// Owns the product of four pairs of signed bytes, in one instruction where the compiler has it.

#if defined(__opencl_c_integer_dot_product_input_4x8bit_packed)
#pragma OPENCL EXTENSION cl_khr_integer_dot_product : enable
static inline int add_dot4(uint a, int b, int sum) { return sum + dot_4x8packed_ss_int(a, (uint)b); }
#elif defined(DOT_PTX)
static inline int add_dot4(uint a, int b, int sum) {
    int result;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
    return result;
}
#elif !defined(DOT_SHIFTS)
static inline int add_dot4(uint a, int b, int sum) {
    const char4 left = as_char4(a), right = as_char4(b);
    return sum + left.x * right.x + left.y * right.y + left.z * right.z + left.w * right.w;
}
#else
#define BYTE(word, i) ((int)(word) << (24 - 8 * (i)) >> 24)
static inline int add_dot4(uint a, int b, int sum) {
    return sum + BYTE(a, 0) * BYTE(b, 0) + BYTE(a, 1) * BYTE(b, 1) + BYTE(a, 2) * BYTE(b, 2) +
           BYTE(a, 3) * BYTE(b, 3);
}
#endif
