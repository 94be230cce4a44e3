// The built-in functions that kernels call, for a CPU without an OpenCL driver; linked to them by their mangled names.

#define BUILTIN __attribute__((overloadable))
#define AS_IN_MEMORY(type, bytes) typedef type type##_in_memory __attribute__((aligned(bytes)))
AS_IN_MEMORY(float16, 4);
AS_IN_MEMORY(uint8, 4);
AS_IN_MEMORY(ushort8, 2);
AS_IN_MEMORY(int4, 4);

float16 BUILTIN vload16(size_t i, const global float *p) { return *(const global float16_in_memory *)(p + 16 * i); }
uint8 BUILTIN vload8(size_t i, const global uint *p) { return *(const global uint8_in_memory *)(p + 8 * i); }
void BUILTIN vstore16(float16 x, size_t i, global float *p) { *(global float16_in_memory *)(p + 16 * i) = x; }
void BUILTIN vstore16(float16 x, size_t i, float *p) { *(float16_in_memory *)(p + 16 * i) = x; }
void BUILTIN vstore4(int4 x, size_t i, local int *p) { *(local int4_in_memory *)(p + 4 * i) = x; }

float8 BUILTIN vload_half8(size_t i, const global half *p) {  // finite ones
    const uint8 bits = __builtin_convertvector(*(const global ushort8_in_memory *)((const global ushort *)p + 8 * i), uint8);
    return as_float8((bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16) * 0x1p112f;
}

float BUILTIN fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
float16 BUILTIN fma(float16 a, float16 b, float16 c) {
    union { float16 vector; float lanes[16]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 16; i++) z.lanes[i] = __builtin_fmaf(x.lanes[i], y.lanes[i], z.lanes[i]);
    return z.vector;
}
float BUILTIN sqrt(float x) { return __builtin_sqrtf(x); }
float16 BUILTIN fmax(float16 a, float16 b) { return a > b ? a : b; }
float16 BUILTIN fmin(float16 a, float b) { return a < b ? a : (float16)(b); }
int BUILTIN min(int a, int b) { return a < b ? a : b; }
int BUILTIN max(int a, int b) { return a > b ? a : b; }
int2 BUILTIN max(int2 a, int2 b) { return a > b ? a : b; }
int4 BUILTIN max(int4 a, int4 b) { return a > b ? a : b; }
int8 BUILTIN max(int8 a, int8 b) { return a > b ? a : b; }
int16 BUILTIN max(int16 a, int16 b) { return a > b ? a : b; }
float16 BUILTIN convert_float16(int16 x) { return __builtin_convertvector(x, float16); }
float16 BUILTIN convert_float16(char16 x) { return __builtin_convertvector(x, float16); }
float16 BUILTIN convert_float16(uchar16 x) { return __builtin_convertvector(x, float16); }
char16 BUILTIN convert_char16(int16 x) { return __builtin_convertvector(x, char16); }
short16 BUILTIN convert_short16(int16 x) { return __builtin_convertvector(x, short16); }
void BUILTIN vstore8(int8 x, size_t i, local int *p) { vstore4(x.lo, 2 * i, p); vstore4(x.hi, 2 * i + 1, p); }
