/* Owns the contract of the int8 KV codec: format, proof, variants.
 *
 * Chunk: n FP16 elements in memory order, n a positive multiple of 32. Payload, in two planes:
 *
 *     u16 peak[n / 32]    FP16 bits, native byte order (little-endian on every supported CPU)
 *     i8  code[n]         two's complement
 *
 * n/16 + n bytes for 2n: 46.875 % saved. All peaks come first because chunks hold a multiple of 512
 * elements: the code plane then starts on a cache line, and every load of a group is aligned.
 *
 * With m the element of largest magnitude in a group (the positive one of a tie):
 *
 *     peak = -m, or +2^-17 if |m| < 2^-17
 *     code = clip(round_half_even(x * fl(128 / peak)), -128, 127)         in binary32
 *     x'   = fp16(code * (peak / 128) + 0)                                one rounding, half to even
 *
 * `peak / 128` is the group's scale. It is exact in binary32 although not always in FP16, which is why
 * the peak is stored; 8 by 11 bits of product are exact too, so x' is code * scale rounded once. The "+ 0"
 * turns a zero code into +0 under a negative scale. The floor makes the scale at least one subnormal step
 * 2^-24, below which FP16 has nothing to tell apart; tiny groups, zeros included, are then kept exactly.
 *
 * Why a second round trip changes nothing. Let u = 2^-24.
 *   1. |m| >= 128 u: m has code -128 and decodes to m itself; codes other than -128 decode to at most
 *      127/128 |m| + max(u/2, 2^-11 |m|) < |m|. So the next peak is the same.
 *   2. x' differs from code * scale by at most 2^-11 |x'| <= 128 * 2^-11 scale = scale / 16 if x' is normal,
 *      and by u / 2 if subnormal: below scale / 2 if scale > u, and x' is exact if scale = u. Either way
 *      x' / scale rounds to the same code (the error of fl(128 / peak) is 2^-24 relative).
 *   3. |m| < 128 u: scale = u, each code is the element's own count of steps, nothing is lost but the sign
 *      of a zero.
 *
 * Source: groups of 32 with an FP16 scale are the paper's 8-bit setting (mzCache 6.5, FlexGen). The
 * signed peak is ours. Reference: mzd/native/int8_numpy.py, same bits.
 */
#ifndef MZD_INT8_CODEC_H
#define MZD_INT8_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MZD_INT8_GROUP = 32,
    MZD_INT8_KEY_FLOOR = 0x0100,      /* 2^-17 as a key, see mzd_int8_key */
    MZD_INT8_KEY_NOT_FINITE = 0xF800, /* the smallest key of an infinity or NaN */
};

/* One implementation. `encode` returns false, and leaves the payload unspecified, if src holds an infinity or
 * NaN. */
typedef struct {
    const char *name;
    bool (*encode)(const uint16_t *src, uint8_t *payload, size_t num_elements);
    void (*decode)(const uint8_t *payload, uint16_t *dst, size_t num_elements);
} mzd_int8_variant;

extern const mzd_int8_variant mzd_int8_plain;
#if defined(__x86_64__) || defined(__i386__)
extern const mzd_int8_variant mzd_int8_avx2;
#elif defined(__aarch64__)
extern const mzd_int8_variant mzd_int8_neon;
#endif

/* Variants that this CPU runs, fastest first; ends with NULL. */
const mzd_int8_variant *const *mzd_int8_variants(void);

/* The variant of that name, the fastest for "auto", NULL if this CPU has none of that name. */
const mzd_int8_variant *mzd_int8_variant_named(const char *name);

static inline size_t mzd_int8_payload_bytes(size_t num_elements)
{
    return num_elements / MZD_INT8_GROUP * sizeof(uint16_t) + num_elements;
}

/* FP16 bits as an integer that orders by magnitude, the positive of two equals last. */
static inline uint16_t mzd_int8_key(uint16_t half)
{
    return (uint16_t)(((half << 1) | (half >> 15)) ^ 1u);
}

/* A group's largest key to the bits of its peak: -m, or 2^-17 for a tiny group. */
static inline uint16_t mzd_int8_peak(uint16_t key)
{
    if (key < MZD_INT8_KEY_FLOOR)
        return MZD_INT8_KEY_FLOOR >> 1;
    return (uint16_t)((key >> 1) | (key << 15));
}

#endif
