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
    /* Result of an extent that the file ended inside of. Positive, so that it is no -errno. */
    MZD_IO_SHORT = 1,
};

typedef struct {
    int64_t offset_bytes; /* in the file */
    uint8_t *address;
    size_t size_bytes;
} mzd_extent;

/* Read or write one extent. If `crc` is given it is continued over the content, in order; unspecified on
 * failure. Returns 0, -errno or MZD_IO_SHORT. */
int mzd_read_extent(int fd, const mzd_extent *extent, uint32_t *crc);
int mzd_write_extent(int fd, const mzd_extent *extent, uint32_t *crc);

/* The two system calls, replaceable so that tests can see short and failing ones. */
typedef struct {
    ssize_t (*read)(int fd, void *data, size_t size, off_t offset);
    ssize_t (*write)(int fd, const void *data, size_t size, off_t offset);
} mzd_io_calls;

extern mzd_io_calls mzd_io;

/* For tests: let every nth call of this process fail as `kind` says ("none" ends it; "short", "eintr", "eio",
 * "enospc"). Returns -1 if the kind is unknown or n is 0. Not for use while extents are in flight. */
int mzd_set_io_fault(unsigned every_nth, const char *kind);

#endif
