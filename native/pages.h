/* Owns the contract of page-level work on memory that the caller owns: bring in, let go, lock, look. */
#ifndef MZD_PAGES_H
#define MZD_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MZD_HUGE_PAGE_BYTES = 2 * 1024 * 1024 };

size_t mzd_page_bytes(void);

/* Every function below takes whole pages (address and size multiples of mzd_page_bytes), may be called from
 * several threads for ranges that share no page, and returns 0 or -errno. */

/* Make all pages resident and writable, their content unchanged (zero if new), in huge pages where whole ones
 * fit and `huge` is set. On failure some pages may have become resident. */
int mzd_populate(uint8_t *address, size_t size, bool huge);

/* Give all pages back: the resident set falls before this returns; a later read finds zeros (private
 * anonymous memory). Locked pages (mlock) are let go too. */
int mzd_release(uint8_t *address, size_t size);

/* Release the whole pages inside a range that need not start or end on one. */
int mzd_release_inside(uint8_t *address, size_t size);

/* Keep pages from being swapped out, or stop doing so. */
int mzd_lock(uint8_t *address, size_t size);
int mzd_unlock(uint8_t *address, size_t size);

/* Bytes of the range that are in memory now. */
int mzd_resident_bytes(uint8_t *address, size_t size, size_t *resident_bytes);

/* Return the C library's free memory to the system; false where it has no such call. */
bool mzd_trim_heap(void);

/* Blocks of at least this size get a mapping of their own, given back when freed; false where not
 * supported. */
bool mzd_set_mmap_threshold(int threshold_bytes);

#endif
