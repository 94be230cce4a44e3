/* Owns the madvise family: what is behind the arena's populate and release. */
#include "pages.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

/* Values of the kernel's interface, for C libraries whose headers are older. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24 /* Linux 5.18 */
#endif

static uint8_t *rounded_up(uint8_t *address, size_t unit)
{
    return address + (unit - (uintptr_t)address % unit) % unit;
}

static uint8_t *rounded_down(uint8_t *address, size_t unit)
{
    return address - (uintptr_t)address % unit;
}

static int advise(uint8_t *address, size_t size, int advice)
{
    return madvise(address, size, advice) == 0 ? 0 : -errno;
}

size_t mzd_page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Write to each page without changing it, even if another thread writes there too. */
static void touch_pages(uint8_t *address, size_t size)
{
    const size_t page = mzd_page_bytes();
    for (size_t offset = 0; offset < size; offset += page)
        __atomic_fetch_or(address + offset, 0, __ATOMIC_RELAXED);
}

static int bring_in(uint8_t *address, size_t size)
{
    const int result = advise(address, size, MADV_POPULATE_WRITE);
    if (result != -EINVAL)
        return result;
    touch_pages(address, size); /* before Linux 5.14 */
    return 0;
}

int mzd_populate(uint8_t *address, size_t size, bool huge)
{
    uint8_t *first = rounded_up(address, MZD_HUGE_PAGE_BYTES);
    uint8_t *last = rounded_down(address + size, MZD_HUGE_PAGE_BYTES);
    if (!huge || first >= last)
        return bring_in(address, size);
    const size_t huge_size = (size_t)(last - first);
    /* Refused where the kernel has no huge pages; small ones do then. */
    const bool advised = advise(first, huge_size, MADV_HUGEPAGE) == 0;
    const int result = bring_in(address, size);
    /* Pages stay huge, but khugepaged must not fill holes that a later release leaves. */
    if (advised)
        advise(first, huge_size, MADV_NOHUGEPAGE);
    return result;
}

int mzd_release(uint8_t *address, size_t size)
{
    int result = advise(address, size, MADV_DONTNEED);
    if (result == -EINVAL) /* locked pages */
        result = advise(address, size, MADV_DONTNEED_LOCKED);
    if (result == -EINVAL && munlock(address, size) == 0) /* locked pages before Linux 5.18 */
        result = advise(address, size, MADV_DONTNEED);
    return result;
}

int mzd_release_inside(uint8_t *address, size_t size)
{
    uint8_t *first = rounded_up(address, mzd_page_bytes());
    uint8_t *last = rounded_down(address + size, mzd_page_bytes());
    return first < last ? mzd_release(first, (size_t)(last - first)) : 0;
}

int mzd_lock(uint8_t *address, size_t size)
{
    return mlock(address, size) == 0 ? 0 : -errno;
}

int mzd_unlock(uint8_t *address, size_t size)
{
    return munlock(address, size) == 0 ? 0 : -errno;
}

int mzd_resident_bytes(uint8_t *address, size_t size, size_t *resident_bytes)
{
    enum { BATCH_PAGES = 4096 }; /* a bounded answer, so that nothing is allocated */
    unsigned char in_memory[BATCH_PAGES];
    const size_t page = mzd_page_bytes();
    *resident_bytes = 0;
    while (size > 0) {
        const size_t batch = size < BATCH_PAGES * page ? size : BATCH_PAGES * page;
        if (mincore(address, batch, in_memory) != 0)
            return -errno;
        for (size_t i = 0; i < batch / page; i++)
            *resident_bytes += (in_memory[i] & 1u) * page;
        address += batch;
        size -= batch;
    }
    return 0;
}

bool mzd_trim_heap(void)
{
#if defined(__GLIBC__)
    malloc_trim(0);
    return true;
#else
    return false;
#endif
}

bool mzd_set_mmap_threshold(int threshold_bytes)
{
#if defined(__GLIBC__)
    return mallopt(M_MMAP_THRESHOLD, threshold_bytes) == 1;
#else
    (void)threshold_bytes;
    return false;
#endif
}
