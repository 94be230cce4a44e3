/* Owns CRC-32C by the CPU's instruction (x86 SSE4.2, ARMv8 CRC), three streams at a time.
 *
 * The instruction takes one step a cycle but gives its result three cycles later, so a single chain uses a
 * third of it. Three neighbouring stripes are therefore run side by side and joined: the register of a
 * stripe, moved past the zero bytes that stand for the next one, is added (xor) to the next one's.
 */
#include "crc32c.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>

#define CRC_TARGET __attribute__((target("sse4.2")))

static bool has_instruction(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
}

CRC_TARGET static inline uint32_t step8(uint32_t crc, const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return (uint32_t)_mm_crc32_u64(crc, word);
}

CRC_TARGET static inline uint32_t step1(uint32_t crc, uint8_t byte)
{
    return _mm_crc32_u8(crc, byte);
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

/* Inline assembly with its own .arch_extension: compilers disagree on the spelling of the target attribute,
 * and some have the intrinsics only under -march. */
#define CRC_TARGET

static bool has_instruction(void)
{
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}

CRC_TARGET static inline uint32_t step8(uint32_t crc, const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}

CRC_TARGET static inline uint32_t step1(uint32_t crc, uint8_t byte)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}

#endif

#ifdef CRC_TARGET

/* Long enough that joining (eight table look-ups) costs nothing, short enough that three fit in any L1. */
enum { STRIPE_BYTES = 2048 };

/* past_stripe[i][b]: the register with byte i equal to b, moved past STRIPE_BYTES zero bytes. */
static uint32_t past_stripe[4][256];

CRC_TARGET static uint32_t single_chain(uint32_t crc, const uint8_t *bytes, size_t size)
{
    for (; size >= 8; size -= 8, bytes += 8)
        crc = step8(crc, bytes);
    for (; size > 0; size--)
        crc = step1(crc, *bytes++);
    return crc;
}

static void build_table(void)
{
    static const uint8_t zeros[STRIPE_BYTES];
    for (int i = 0; i < 4; i++)
        for (uint32_t b = 0; b < 256; b++)
            past_stripe[i][b] = single_chain(b << (8 * i), zeros, sizeof zeros);
}

static inline uint32_t moved_past_stripe(uint32_t crc)
{
    return past_stripe[0][crc & 0xFFu] ^ past_stripe[1][(crc >> 8) & 0xFFu] ^
           past_stripe[2][(crc >> 16) & 0xFFu] ^ past_stripe[3][crc >> 24];
}

CRC_TARGET static uint32_t three_stripes(uint32_t crc, const uint8_t *bytes)
{
    uint32_t second = 0, third = 0;
    for (const uint8_t *end = bytes + STRIPE_BYTES; bytes < end; bytes += 8) {
        crc = step8(crc, bytes);
        second = step8(second, bytes + STRIPE_BYTES);
        third = step8(third, bytes + 2 * STRIPE_BYTES);
    }
    return moved_past_stripe(moved_past_stripe(crc) ^ second) ^ third;
}

static uint32_t update(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    for (; size >= 3 * STRIPE_BYTES; size -= 3 * STRIPE_BYTES, bytes += 3 * STRIPE_BYTES)
        crc = three_stripes(crc, bytes);
    return ~single_chain(crc, bytes, size);
}

mzd_crc32c_function mzd_crc32c_hardware(void)
{
    if (!has_instruction())
        return NULL;
    build_table();
    return update;
}

#else

mzd_crc32c_function mzd_crc32c_hardware(void)
{
    return NULL;
}

#endif
