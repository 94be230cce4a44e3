/* Runs the C parts without Python, for sanitizers and for other CPUs under emulation.
 *
 * Prints one line a variant, "int8 NAME CRC-OF-PAYLOADS CRC-OF-CHUNKS", which must not depend on the CPU, and
 * aborts on the first broken promise. Every buffer has exactly the size it needs, so that a step too far is seen.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
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

enum { NUM_EXTENTS = 200 };

/* Extents side by side in the file, with a gap now and then, in another order in memory; some runs backwards. */
static void lay_out(mzd_extent *extents, uint8_t *memory, size_t slot_bytes)
{
    int64_t offset = 0;
    for (size_t i = 0; i < NUM_EXTENTS; i++) {
        offset += random_bits() % 8 == 0 ? 4096 : 0;
        const size_t slot = i * 77 % NUM_EXTENTS; /* 77 and 200 share no factor: each slot once */
        const size_t size = random_bits() % 16 == 0 ? 0 : 1 + random_bits() % slot_bytes;
        extents[i] = (mzd_extent){offset, memory + slot * slot_bytes, size};
        offset += (int64_t)size;
    }
    for (size_t start = 0; start + 20 < NUM_EXTENTS; start += 20 + random_bits() % 40)
        for (size_t i = 0; i < 10; i++) {
            const mzd_extent first = extents[start + i];
            extents[start + i] = extents[start + 19 - i];
            extents[start + 19 - i] = first;
        }
}

static void check_batches(const char *fault, unsigned every_nth, size_t slot_bytes)
{
    FILE *file = tmpfile();
    REQUIRE(file != NULL);
    uint8_t *content = exact_buffer(NUM_EXTENTS * slot_bytes), *back = exact_buffer(NUM_EXTENTS * slot_bytes);
    for (size_t i = 0; i < NUM_EXTENTS * slot_bytes; i++)
        content[i] = back[i] = (uint8_t)random_bits();
    mzd_extent extents[NUM_EXTENTS];
    uint32_t written[NUM_EXTENTS] = {0}, read[NUM_EXTENTS] = {0};
    int32_t results[NUM_EXTENTS];
    lay_out(extents, content, slot_bytes);
    REQUIRE(mzd_set_io_fault(every_nth, fault) == 0);
    mzd_write_extents(fileno(file), extents, NUM_EXTENTS, written, results);
    for (size_t i = 0; i < NUM_EXTENTS; i++) {
        REQUIRE(results[i] == 0);
        REQUIRE(written[i] == mzd_crc32c(0, extents[i].address, extents[i].size_bytes));
        extents[i].address = back + (extents[i].address - content);
        memset(extents[i].address, 0, extents[i].size_bytes);
    }
    mzd_read_extents(fileno(file), extents, NUM_EXTENTS, read, results);
    REQUIRE(mzd_set_io_fault(0, "none") == 0);
    for (size_t i = 0; i < NUM_EXTENTS; i++)
        REQUIRE(results[i] == 0 && read[i] == written[i]);
    REQUIRE(memcmp(content, back, NUM_EXTENTS * slot_bytes) == 0);
    fclose(file);
    free(content);
    free(back);
}

/* Read calls that this process has made; 0 where the kernel does not count them. */
static unsigned long read_calls(void)
{
    unsigned long count = 0;
    char line[64];
    FILE *io = fopen("/proc/self/io", "r");
    while (io != NULL && fgets(line, sizeof line, io) != NULL)
        if (sscanf(line, "syscr: %lu", &count) == 1)
            break;
    if (io != NULL)
        fclose(io);
    return count;
}

static void check_number_of_calls(bool is_reversed)
{
    enum { COUNT = 64, SIZE = 96 * 1024 };
    FILE *file = tmpfile();
    uint8_t *memory = exact_buffer(COUNT * SIZE);
    mzd_extent extents[COUNT];
    int32_t results[COUNT];
    memset(memory, 1, COUNT * SIZE);
    for (size_t i = 0; i < COUNT; i++)
        extents[is_reversed ? COUNT - 1 - i : i] =
            (mzd_extent){(int64_t)(i * SIZE), memory + i * 13 % COUNT * SIZE, SIZE};
    REQUIRE(file != NULL);
    mzd_write_extents(fileno(file), extents, COUNT, NULL, results);
    const unsigned long start = read_calls(), itself = read_calls() - start;
    mzd_read_extents(fileno(file), extents, COUNT, NULL, results);
    const unsigned long calls = read_calls() - start - 2 * itself;
    REQUIRE(start == 0 || calls == (COUNT * SIZE + MZD_IO_PIECE_BYTES - 1) / MZD_IO_PIECE_BYTES);
    fclose(file);
    free(memory);
}

/* One of several extents that go together is at fault: it alone has the error, whatever the kernel blames. */
static void check_blame(void)
{
    FILE *file = tmpfile();
    uint8_t *memory = exact_buffer(5 * 4096);
    memset(memory, 1, 5 * 4096);
    mzd_extent extents[5];
    int32_t results[5];
    for (size_t i = 0; i < 5; i++)
        extents[i] = (mzd_extent){(int64_t)i * 4096, memory + i * 4096, 4096};
    REQUIRE(file != NULL);
    mzd_write_extents(fileno(file), extents, 4, NULL, results);
    extents[1].address = (uint8_t *)1; /* page 0 is never mapped */
    mzd_read_extents(fileno(file), extents, 5, NULL, results);
    REQUIRE(results[0] == 0 && results[1] == -EFAULT && results[2] == 0 && results[3] == 0);
    REQUIRE(results[4] == MZD_IO_SHORT);
    mzd_write_extents(fileno(file), extents, 5, NULL, results);
    REQUIRE(results[0] == 0 && results[1] == -EFAULT && results[2] == 0 && results[4] == 0);
    mzd_read_extents(-1, extents + 2, 3, NULL, results);
    REQUIRE(results[0] == -EBADF && results[1] == -EBADF && results[2] == -EBADF);
    REQUIRE(mzd_set_io_fault(2, "eio") == 0);
    mzd_read_extents(fileno(file), extents + 2, 3, NULL, results);
    REQUIRE(mzd_set_io_fault(0, "none") == 0);
    REQUIRE(results[0] == 0 && results[1] == -EIO && results[2] == 0);
    fclose(file);
    free(memory);
}

/* A direct call with one bad address fails as a whole: asked one by one, each extent answers for itself. */
static void check_blame_of_direct_calls(void)
{
    enum { COUNT = 5, BAD = 3, SIZE = 4096 };
    FILE *file = tmpfile();
    uint8_t *pages = mmap(NULL, (COUNT + 1) * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mzd_extent extents[COUNT];
    int32_t results[COUNT];
    REQUIRE(file != NULL && pages != MAP_FAILED);
    for (size_t i = 0; i < COUNT; i++)
        extents[i] = (mzd_extent){(int64_t)(i * SIZE), pages + i * SIZE, SIZE};
    mzd_write_extents(fileno(file), extents, COUNT, NULL, results);
    extents[BAD].address = pages + COUNT * SIZE - 1;
    const bool is_direct = fcntl(fileno(file), F_SETFL, O_DIRECT) == 0;
    const bool is_refused = mzd_read_extent(fileno(file), &extents[BAD], NULL) == -EINVAL;
    const unsigned long start = read_calls(), itself = read_calls() - start;
    mzd_read_extents(fileno(file), extents, COUNT, NULL, results);
    const unsigned long calls = read_calls() - start - 2 * itself;
    for (size_t i = 0; i < COUNT && is_direct; i++) /* some disks take any address */
        REQUIRE(results[i] == (i == BAD && is_refused ? -EINVAL : 0));
    REQUIRE(start == 0 || !is_refused || calls == 1 + COUNT);
    munmap(pages, (COUNT + 1) * SIZE);
    fclose(file);
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
    REQUIRE(mzd_read_extent(fileno(file), &(mzd_extent){5001, content, 10}, NULL) == -EINVAL);
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
    check_batches("none", 0, 5000);
    check_batches("short", 2, 5000);
    check_batches("short", 1, 300);
    check_batches("eintr", 3, 5000);
    check_batches("none", 0, 100 * 1024);
    check_number_of_calls(false);
    check_number_of_calls(true);
    check_blame();
    check_blame_of_direct_calls();
    if (has_pages)
        check_pages();
    puts("done");
    return 0;
}
