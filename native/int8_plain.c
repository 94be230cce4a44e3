/* Owns the int8 codec in plain C: the path of CPUs without a vector one, and the yardstick of the others. */
#include "int8_codec.h"

#include "fp16.h"

/* 1.5 * 2^23: adding it leaves a float's nearest integer (half to even) in the low mantissa bits. */
static const float ROUNDER = 12582912.0f;
static const int32_t ROUNDER_BITS = 0x4B400000;

static uint16_t largest_key(const uint16_t *group)
{
    uint16_t largest = 0;
    for (int i = 0; i < MZD_INT8_GROUP; i++) {
        const uint16_t key = mzd_int8_key(group[i]);
        largest = key > largest ? key : largest;
    }
    return largest;
}

static int8_t code_of(uint16_t half, float inverse_scale)
{
    const float rounded = mzd_float_of_half(half) * inverse_scale + ROUNDER;
    const int32_t code = (int32_t)mzd_bits_of_float(rounded) - ROUNDER_BITS;
    return (int8_t)(code > 127 ? 127 : code); /* never below -128: the peak is the largest magnitude */
}

static bool encode(const uint16_t *src, uint8_t *payload, size_t num_elements)
{
    const size_t num_groups = num_elements / MZD_INT8_GROUP;
    uint16_t *peaks = (uint16_t *)payload;
    int8_t *codes = (int8_t *)(peaks + num_groups);
    for (size_t g = 0; g < num_groups; g++, src += MZD_INT8_GROUP, codes += MZD_INT8_GROUP) {
        const uint16_t key = largest_key(src);
        if (key >= MZD_INT8_KEY_NOT_FINITE)
            return false;
        peaks[g] = mzd_int8_peak(key);
        const float inverse_scale = 128.0f / mzd_float_of_half(peaks[g]);
        for (int i = 0; i < MZD_INT8_GROUP; i++)
            codes[i] = code_of(src[i], inverse_scale);
    }
    return true;
}

static void decode(const uint8_t *payload, uint16_t *dst, size_t num_elements)
{
    const size_t num_groups = num_elements / MZD_INT8_GROUP;
    const uint16_t *peaks = (const uint16_t *)payload;
    const int8_t *codes = (const int8_t *)(peaks + num_groups);
    for (size_t g = 0; g < num_groups; g++, dst += MZD_INT8_GROUP, codes += MZD_INT8_GROUP) {
        const float scale = mzd_float_of_half(peaks[g]) * 0x1p-7f;
        for (int i = 0; i < MZD_INT8_GROUP; i++)
            dst[i] = mzd_half_of_float((float)codes[i] * scale + 0.0f);
    }
}

const mzd_int8_variant mzd_int8_plain = {"plain", encode, decode};
