/* Owns the contract of CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, RFC 3720 B.4). */
#ifndef MZD_CRC32C_H
#define MZD_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* CRC of the bytes that gave `crc` followed by these; 0 starts. crc32c(0, "123456789", 9) is 0xE3069283. */
typedef uint32_t (*mzd_crc32c_function)(uint32_t crc, const void *data, size_t size);

typedef struct {
    const char *name;
    mzd_crc32c_function update;
} mzd_crc32c_variant;

/* Variants that this CPU runs, fastest first; ends with a NULL name. Call once before `mzd_crc32c`. */
const mzd_crc32c_variant *mzd_crc32c_variants(void);

/* The fastest variant. */
uint32_t mzd_crc32c(uint32_t crc, const void *data, size_t size);

uint32_t mzd_crc32c_table(uint32_t crc, const void *data, size_t size);

/* The instruction's variant, NULL where this CPU lacks it. */
mzd_crc32c_function mzd_crc32c_hardware(void);

#endif
