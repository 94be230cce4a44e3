/* Owns the conversions between binary16 bits and float for compilers and CPUs without them.
 *
 * Both directions avoid binary32 subnormals, so that a caller's flush-to-zero mode (set by some
 * -ffast-math libraries for the whole thread) cannot change a result.
 */
#ifndef MZD_FP16_H
#define MZD_FP16_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float arithmetic must be binary32 (x87 would change bits): build without the extension"
#endif

#define MZD_FP16_SIGN 0x8000u
#define MZD_FP16_INFINITY 0x7C00u

static inline float mzd_float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t mzd_bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Exact for every input; NaN keeps its payload and turns quiet, as F16C does. */
static inline float mzd_float_of_half(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & MZD_FP16_SIGN) << 16;
    const uint32_t magnitude = half & 0x7FFFu;
    if (magnitude < 0x0400u) { /* zero or subnormal: a count of steps of 2^-24 */
        const uint32_t steps = mzd_bits_of_float((float)magnitude * 0x1p-24f);
        return mzd_float_of_bits(sign | steps);
    }
    uint32_t bits = (magnitude << 13) + ((127u - 15u) << 23);
    if (magnitude >= MZD_FP16_INFINITY)
        bits += (127u - 15u) << 23; /* exponent 31 becomes 255 */
    if (magnitude > MZD_FP16_INFINITY)
        bits |= 1u << 22;
    return mzd_float_of_bits(sign | bits);
}

/* Rounds to nearest, ties to even; 65520 and above become infinity; NaN turns quiet. */
static inline uint16_t mzd_half_of_float(float value)
{
    const uint32_t bits = mzd_bits_of_float(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint16_t sign = (uint16_t)((bits >> 16) & MZD_FP16_SIGN);
    if (magnitude > 0x7F800000u)
        return (uint16_t)(sign | MZD_FP16_INFINITY | 0x0200u | ((magnitude >> 13) & 0x03FFu));
    if (magnitude >= 0x477FF000u)
        return (uint16_t)(sign | MZD_FP16_INFINITY);
    if (magnitude < 0x38800000u) { /* below 2^-14: 0.5f has a unit in the last place of 2^-24 */
        const uint32_t rounded = mzd_bits_of_float(mzd_float_of_bits(magnitude) + 0.5f);
        return (uint16_t)(sign | (rounded - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0x0FFFu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded >> 13) - ((127u - 15u) << 10)));
}

#endif
