/* Runs the C parts without Python, for sanitizers and for other CPUs under emulation.
 *
 * Prints one line a variant, "int8 NAME CRC-OF-PAYLOADS CRC-OF-CHUNKS", which must not depend on the CPU, and
 * aborts on the first broken promise. Every buffer has exactly the size it needs, so that a step too far is seen.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "crc32c.h"
#include "extent_io.h"
#include "int8_codec.h"
#include "pages.h"

#define REQUIRE(condition)                                                                                   \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                  \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

enum { NUM_GROUPS = 4096 };

static uint32_t random_bits(void)
{
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static void *exact_buffer(size_t size)
{
    void *buffer = malloc(size);
    REQUIRE(buffer != NULL);
    return buffer;
}

/* Groups whose magnitudes lie below one limit each, from subnormal to the largest. */
static uint16_t *finite_chunk(size_t num_elements)
{
    uint16_t *chunk = exact_buffer(num_elements * sizeof *chunk);
    for (size_t i = 0; i < num_elements; i++) {
        const uint32_t limit = (uint32_t)(i / MZD_INT8_GROUP) * 0x7C00u / NUM_GROUPS + 1;
        const uint32_t bits = random_bits();
        chunk[i] = (uint16_t)((bits >> 1) % limit | (bits & 1u) << 15);
    }
    return chunk;
}

static void check_int8(const mzd_int8_variant *variant, const uint16_t *chunk, size_t num_elements)
{
    const size_t payload_bytes = mzd_int8_payload_bytes(num_elements);
    uint8_t *payload = exact_buffer(payload_bytes), *again = exact_buffer(payload_bytes);
    uint16_t *once = exact_buffer(num_elements * sizeof *once);
    REQUIRE(variant->encode(chunk, payload, num_elements));
    variant->decode(payload, once, num_elements);
    REQUIRE(variant->encode(once, again, num_elements));
    REQUIRE(memcmp(payload, again, payload_bytes) == 0);
    printf("int8 %s %08x %08x\n", variant->name, mzd_crc32c(0, payload, payload_bytes),
           mzd_crc32c(0, once, num_elements * sizeof *once));
    once[num_elements - 1] = 0x7C00;
    REQUIRE(!variant->encode(once, payload, num_elements));
    free(payload);
    free(again);
    free(once);
}

static void check_crc32c(void)
{
    for (const mzd_crc32c_variant *variant = mzd_crc32c_variants(); variant->name != NULL; variant++)
        REQUIRE(variant->update(0, "123456789", 9) == 0xE3069283u);
    for (size_t size = 0; size < 20000; size = size * 9 / 8 + 1) {
        uint8_t *data = exact_buffer(size + 1);
        for (size_t i = 0; i <= size; i++)
            data[i] = (uint8_t)random_bits();
        REQUIRE(mzd_crc32c(5, data + 1, size) == mzd_crc32c_table(5, data + 1, size));
        free(data);
    }
}

static void check_extents(const char *fault)
{
    FILE *file = tmpfile();
    REQUIRE(file != NULL);
    uint8_t *content = exact_buffer(70001), *back = exact_buffer(70001);
    memset(content, 0x5A, 70001);
    uint32_t written = 0, read = 0;
    REQUIRE(mzd_set_io_fault(2, fault) == 0);
    REQUIRE(mzd_write_extent(fileno(file), &(mzd_extent){3, content, 70001}, &written) == 0);
    REQUIRE(mzd_read_extent(fileno(file), &(mzd_extent){3, back, 70001}, &read) == 0);
    REQUIRE(mzd_read_extent(fileno(file), &(mzd_extent){70000, back, 5000}, NULL) == MZD_IO_SHORT);
    REQUIRE(mzd_set_io_fault(0, "none") == 0);
    REQUIRE(written == read && written == mzd_crc32c(0, content, 70001));
    fclose(file);
    free(content);
    free(back);
}

/* As direct I/O on some file systems: after the short read at the end, the next offset is refused. */
static ssize_t aligned_only_read(int fd, void *data, size_t size, off_t offset)
{
    errno = EINVAL;
    return offset % 4096 == 0 ? pread(fd, data, size, offset) : -1;
}

static void check_refused_offsets(void)
{
    FILE *file = tmpfile();
    uint8_t *content = exact_buffer(8192);
    memset(content, 1, 8192);
    REQUIRE(file != NULL && mzd_write_extent(fileno(file), &(mzd_extent){0, content, 5000}, NULL) == 0);
    mzd_io.read = aligned_only_read;
    REQUIRE(mzd_read_extent(fileno(file), &(mzd_extent){0, content, 8192}, NULL) == MZD_IO_SHORT);
    REQUIRE(mzd_read_extent(fileno(file), &(mzd_extent){1, content, 10}, NULL) == -EINVAL);
    mzd_io.read = pread;
    fclose(file);
    free(content);
}

static void check_pages(void)
{
    const size_t size = 2 * MZD_HUGE_PAGE_BYTES;
    uint8_t *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(pages != MAP_FAILED);
    size_t resident;
    pages[0] = 1;
    REQUIRE(mzd_populate(pages, size, true) == 0 && pages[0] == 1);
    REQUIRE(mzd_resident_bytes(pages, size, &resident) == 0 && resident == size);
    REQUIRE(mzd_release_inside(pages + 1, size - 1) == 0 && pages[0] == 1);
    REQUIRE(mzd_resident_bytes(pages, size, &resident) == 0 && resident == mzd_page_bytes());
    REQUIRE(mzd_release_inside(pages + 1, 1) == 0);
    munmap(pages, size);
}

int main(int argc, char **argv)
{
    /* Emulators know no populate and no residency: "--no-pages" leaves these out. */
    const bool has_pages = !(argc > 1 && strcmp(argv[1], "--no-pages") == 0);
    const size_t num_elements = (size_t)NUM_GROUPS * MZD_INT8_GROUP;
    check_crc32c();
    uint16_t *chunk = finite_chunk(num_elements);
    for (const mzd_int8_variant *const *variant = mzd_int8_variants(); *variant != NULL; variant++)
        check_int8(*variant, chunk, num_elements);
    free(chunk);
    check_extents("none");
    check_extents("short");
    check_extents("eintr");
    check_refused_offsets();
    if (has_pages)
        check_pages();
    puts("done");
    return 0;
}
