// Owns the plain read: every byte once, and nothing done with it. What kernels are measured against.
//
// Each work-item leaves in `sums` the exclusive or of all 32-bit words that it has read, so that no read can be
// left out.
//
//   source  (lines, 16) uint, a multiple of 64 bytes
//   sums    (work-items,) uint

#include "places.cl"
#include "vector.cl"

static inline uint fold(const uint4 x) { return x.x ^ x.y ^ x.z ^ x.w; }

// For a CPU: a work-item reads a run of lines, four at a time, so that several are on their way.
ONE_WORK_ITEM kernel void read_runs(global const uint* source, global uint* sums, const int lines PLACES2) {
    AT(source, 0);
    AT(sums, 1);
    const size_t item = get_global_id(0), items = get_global_size(0);
    const size_t end = lines * (item + 1) / items;
    size_t line = lines * item / items;
    uint16 a = 0, b = 0, c = 0, d = 0;
    for (; line + 4 <= end; line += 4) {
        a ^= vload16(line, source);
        b ^= vload16(line + 1, source);
        c ^= vload16(line + 2, source);
        d ^= vload16(line + 3, source);
    }
    for (; line < end; ++line) a ^= vload16(line, source);
    a ^= b ^ c ^ d;
    sums[item] = fold(a.lo.lo ^ a.lo.hi ^ a.hi.lo ^ a.hi.hi);
}

// For a GPU: neighbouring work-items read neighbouring 16 bytes.
kernel void read_strides(global const uint* source, global uint* sums, const int lines PLACES2) {
    AT(source, 0);
    AT(sums, 1);
    const size_t stride = get_global_size(0), end = (size_t)lines * 4;
    size_t i = get_global_id(0);
    uint4 a = 0, b = 0, c = 0, d = 0;
    for (; i + 3 * stride < end; i += 4 * stride) {
        a ^= vload4(i, source);
        b ^= vload4(i + stride, source);
        c ^= vload4(i + 2 * stride, source);
        d ^= vload4(i + 3 * stride, source);
    }
    for (; i < end; i += stride) a ^= vload4(i, source);
    sums[get_global_id(0)] = fold(a ^ b ^ c ^ d);
}
