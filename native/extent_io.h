/* Owns the contract of reading and writing extents: whole or a named failure, whatever the kernel returns. */
#ifndef MZD_EXTENT_IO_H
#define MZD_EXTENT_IO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    /* Largest single call. Direct reads into huge pages are as fast as with 8 MiB and 1.2 times as fast as with
     * 1 MiB, checksums included (virtio disk); smaller would keep more of a piece in the cache for its sum. */
    MZD_IO_PIECE_BYTES = 4 * 1024 * 1024,
    /* Extents of a single call. Enough for a piece of the smallest chunks, 96 KiB. */
    MZD_IO_PARTS_MAX = 64,
    /* Result of an extent that the file ended inside of. Positive, so that it is no -errno. */
    MZD_IO_SHORT = 1,
};

typedef struct {
    int64_t offset_bytes; /* in the file */
    uint8_t *address;
    size_t size_bytes;
} mzd_extent;

/* Read or write extents, each with a result of its own: 0, -errno or MZD_IO_SHORT; one that fails does not stop
 * the next. Neighbours in the array that are neighbours in the file, in either order, go together in one call,
 * wherever they lie in memory; memory that direct I/O refuses is reached by a copy. If `crcs` is given, each is continued over its extent's content; unspecified where
 * the extent failed.
 *
 * Direct I/O of 4 MiB a call over one call an extent, medians of ratios in one run, virtio disk; 96 KiB extents:
 * reads 1.3 to 1.5 with one thread, 1.2 to 1.5 with two, writes 1.5 to 1.9 and 1.2 to 1.3; 52 KiB: reads 1.6 to 1.8
 * and 1.3 to 1.5, writes 2.1 and 1.7; from 256 KiB on no difference. */
void mzd_read_extents(int fd, const mzd_extent *extents, size_t count, uint32_t *crcs, int32_t *results);
void mzd_write_extents(int fd, const mzd_extent *extents, size_t count, uint32_t *crcs, int32_t *results);

/* The same for one extent; returns its result. */
int mzd_read_extent(int fd, const mzd_extent *extent, uint32_t *crc);
int mzd_write_extent(int fd, const mzd_extent *extent, uint32_t *crc);

/* The two system calls, replaceable so that tests can see short and failing ones. While one is replaced, it gets
 * one part at a time: to the loop that is a call that was cut short at the end of the part. */
typedef struct {
    ssize_t (*read)(int fd, void *data, size_t size, off_t offset);
    ssize_t (*write)(int fd, const void *data, size_t size, off_t offset);
} mzd_io_calls;

extern mzd_io_calls mzd_io;

/* For tests: let every nth call of this process fail as `kind` says ("none" ends it; "short", "eintr", "eio",
 * "enospc"). Returns -1 if the kind is unknown or n is 0. Not for use while extents are in flight. */
int mzd_set_io_fault(unsigned every_nth, const char *kind);

#endif
