/* Owns the int8 codec for aarch64, where NEON is part of the base architecture. */
#include "int8_codec.h"

#if defined(__aarch64__)
#include <arm_neon.h>

static inline uint16x8_t keys_of(const uint16_t *halves)
{
    const uint16x8_t bits = vld1q_u16(halves);
    const uint16x8_t rotated = vsriq_n_u16(vshlq_n_u16(bits, 1), bits, 15);
    return veorq_u16(rotated, vdupq_n_u16(1));
}

static inline uint16_t largest_key(const uint16_t *group)
{
    const uint16x8_t low = vmaxq_u16(keys_of(group), keys_of(group + 8));
    const uint16x8_t high = vmaxq_u16(keys_of(group + 16), keys_of(group + 24));
    return vmaxvq_u16(vmaxq_u16(low, high));
}

static inline float float_of_half(uint16_t half)
{
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}

static inline int16x4_t four_codes(uint16x4_t halves, float inverse_scale)
{
    const float32x4_t values = vcvt_f32_f16(vreinterpret_f16_u16(halves));
    return vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(values, inverse_scale))); /* n: half to even */
}

static inline void encode_group(const uint16_t *group, int8_t *codes, float inverse_scale)
{
    for (int i = 0; i < MZD_INT8_GROUP; i += 8) {
        const uint16x8_t halves = vld1q_u16(group + i);
        const int16x4_t low = four_codes(vget_low_u16(halves), inverse_scale);
        const int16x4_t high = four_codes(vget_high_u16(halves), inverse_scale);
        vst1_s8(codes + i, vqmovn_s16(vcombine_s16(low, high))); /* saturation is the clip */
    }
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
        encode_group(src, codes, 128.0f / float_of_half(peaks[g]));
    }
    return true;
}

static inline uint16x4_t four_halves(int16x4_t codes, float32x4_t scale)
{
    const float32x4_t values = vcvtq_f32_s32(vmovl_s16(codes));
    return vreinterpret_u16_f16(vcvt_f16_f32(vfmaq_f32(vdupq_n_f32(0.0f), values, scale)));
}

static inline void decode_group(const int8_t *codes, uint16_t *dst, float32x4_t scale)
{
    for (int i = 0; i < MZD_INT8_GROUP; i += 8) {
        const int16x8_t wide = vmovl_s8(vld1_s8(codes + i));
        const uint16x4_t low = four_halves(vget_low_s16(wide), scale);
        const uint16x4_t high = four_halves(vget_high_s16(wide), scale);
        vst1q_u16(dst + i, vcombine_u16(low, high));
    }
}

static void decode(const uint8_t *payload, uint16_t *dst, size_t num_elements)
{
    const size_t num_groups = num_elements / MZD_INT8_GROUP;
    const uint16_t *peaks = (const uint16_t *)payload;
    const int8_t *codes = (const int8_t *)(peaks + num_groups);
    for (size_t g = 0; g < num_groups; g++, dst += MZD_INT8_GROUP, codes += MZD_INT8_GROUP)
        decode_group(codes, dst, vdupq_n_f32(float_of_half(peaks[g]) * 0x1p-7f));
}

const mzd_int8_variant mzd_int8_neon = {"neon", encode, decode};

#endif
