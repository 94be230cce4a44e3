/* Owns CRC-32C by tables (eight bytes a step) and the choice of a variant for this CPU. */
#include "crc32c.h"

#include <string.h>

static const uint32_t POLYNOMIAL = 0x82F63B78u;

/* slice[k][b]: the CRC register after byte b and then k zero bytes. */
static uint32_t slice[8][256];
static mzd_crc32c_variant variants[3];

static uint32_t byte_remainder(uint32_t byte)
{
    for (int bit = 0; bit < 8; bit++)
        byte = (byte >> 1) ^ (byte & 1u ? POLYNOMIAL : 0u);
    return byte;
}

static void build_tables(void)
{
    for (uint32_t b = 0; b < 256; b++)
        slice[0][b] = byte_remainder(b);
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++)
            slice[k][b] = (slice[k - 1][b] >> 8) ^ slice[0][slice[k - 1][b] & 0xFFu];
}

static uint32_t eight_bytes(uint32_t crc, const uint8_t *data)
{
    /* Bytes one by one, so that the byte order of the CPU does not matter. */
    uint32_t next = slice[3][data[4]] ^ slice[2][data[5]] ^ slice[1][data[6]] ^ slice[0][data[7]];
    for (int i = 0; i < 4; i++)
        next ^= slice[7 - i][((crc >> (8 * i)) & 0xFFu) ^ data[i]];
    return next;
}

uint32_t mzd_crc32c_table(uint32_t crc, const void *data, size_t size)
{
    const uint8_t *bytes = data;
    crc = ~crc;
    for (; size >= 8; size -= 8, bytes += 8)
        crc = eight_bytes(crc, bytes);
    for (; size > 0; size--)
        crc = (crc >> 8) ^ slice[0][(crc ^ *bytes++) & 0xFFu];
    return ~crc;
}

const mzd_crc32c_variant *mzd_crc32c_variants(void)
{
    if (variants[0].name != NULL)
        return variants;
    build_tables();
    const mzd_crc32c_variant table = {"table", mzd_crc32c_table};
    const mzd_crc32c_variant hardware = {"hardware", mzd_crc32c_hardware()};
    if (hardware.update != NULL)
        variants[1] = table;
    variants[0] = hardware.update != NULL ? hardware : table;
    return variants;
}

uint32_t mzd_crc32c(uint32_t crc, const void *data, size_t size)
{
    return variants[0].update(crc, data, size);
}
