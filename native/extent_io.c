/* Owns the loops around pread and pwrite. */
#include "extent_io.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crc32c.h"

mzd_io_calls mzd_io = {pread, pwrite};

typedef ssize_t (*transfer)(int fd, uint8_t *address, size_t size, off_t offset);

static ssize_t read_some(int fd, uint8_t *address, size_t size, off_t offset)
{
    return mzd_io.read(fd, address, size, offset);
}

static ssize_t write_some(int fd, uint8_t *address, size_t size, off_t offset)
{
    return mzd_io.write(fd, address, size, offset);
}

/* After a short direct read at the end of a file the next offset is unaligned, and some file systems then say
 * EINVAL where others say 0 bytes. */
static bool is_at_end(int fd, off_t offset)
{
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && offset >= status.st_size;
}

static int result_of_error(int fd, int error, off_t offset, bool is_continued)
{
    if (error == EINVAL && is_continued && is_at_end(fd, offset))
        return MZD_IO_SHORT;
    return -error;
}

/* All of the extent, in pieces, each continued until it is whole. */
static int transfer_extent(transfer some, int fd, const mzd_extent *extent, uint32_t *crc)
{
    for (size_t done = 0; done < extent->size_bytes;) {
        const size_t left = extent->size_bytes - done;
        const size_t piece = left < MZD_IO_PIECE_BYTES ? left : MZD_IO_PIECE_BYTES;
        uint8_t *address = extent->address + done;
        const off_t offset = (off_t)(extent->offset_bytes + (int64_t)done);
        const ssize_t count = some(fd, address, piece, offset);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return result_of_error(fd, errno, offset, done > 0);
        if (count == 0)
            return MZD_IO_SHORT;
        if (crc != NULL)
            *crc = mzd_crc32c(*crc, address, (size_t)count);
        done += (size_t)count;
    }
    return 0;
}

int mzd_read_extent(int fd, const mzd_extent *extent, uint32_t *crc)
{
    return transfer_extent(read_some, fd, extent, crc);
}

int mzd_write_extent(int fd, const mzd_extent *extent, uint32_t *crc)
{
    return transfer_extent(write_some, fd, extent, crc);
}
