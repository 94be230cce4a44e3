/* Owns the loop around preadv and pwritev: which extents go together, and what each one's result is. */
#include "extent_io.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "crc32c.h"

enum {
    ALIGNMENT_BYTES = 4096, /* the most that a disk asks of memory */
    BOUNCE_BYTES = 1024 * 1024,
    PIPE_BYTES = 32 * 1024, /* fits into an empty pipe, so that its writer never waits */
};

mzd_io_calls mzd_io = {pread, pwrite};

typedef struct {
    ssize_t (*some)(int fd, const struct iovec *parts, size_t count, off_t offset);
    int fd;
    const mzd_extent *extents;
    size_t count, parts_max;
    uint32_t *crcs;
    int32_t *results;
    /* Extents that touch each other in the file, in this order or in the other: they go together. */
    size_t run_start, run_end;
    bool is_reversed;
    /* Where the transfer stands: at this place of the run, after so many bytes of its extent. */
    size_t position, done;
    /* Places before this one go alone, since a call for several of them failed. */
    size_t alone_until;
} transfer;

/* Whether direct I/O may have refused the memory, not the file: drivers hand out memory that is not page-aligned,
 * or map pages of their own, which the kernel does not lend to a disk (EFAULT, though they are there). */
static bool is_memory_refused(const struct iovec *part, int error)
{
    return error == EFAULT || (error == EINVAL && (uintptr_t)part->iov_base % ALIGNMENT_BYTES != 0);
}

/* Copy as the kernel does, through a pipe: false with EFAULT where memory is missing, which would kill a memcpy. */
static bool copy_checked(void *to, const void *from, size_t size)
{
    int ends[2];
    size_t done = 0;
    if (pipe(ends) != 0)
        return false;
    while (done < size) {
        const size_t piece = size - done < PIPE_BYTES ? size - done : PIPE_BYTES;
        const ssize_t written = write(ends[1], (const uint8_t *)from + done, piece);
        if (written <= 0 || read(ends[0], (uint8_t *)to + done, (size_t)written) != written)
            break;
        done += (size_t)written;
    }
    const int error = errno;
    close(ends[0]);
    close(ends[1]);
    errno = error;
    return done == size;
}

/* Move a piece by way of memory that suits the disk; -1 with errno set. */
static ssize_t move_through(void *way, size_t size, bool is_read, int fd, void *memory, off_t offset)
{
    if (!is_read && !copy_checked(way, memory, size))
        return -1;
    const ssize_t moved = is_read ? mzd_io.read(fd, way, size, offset) : mzd_io.write(fd, way, size, offset);
    if (is_read && moved > 0 && !copy_checked(memory, way, (size_t)moved))
        return -1;
    return moved;
}

static ssize_t move_by_way(bool is_read, int fd, const struct iovec *part, off_t offset)
{
    const size_t size = part->iov_len < BOUNCE_BYTES ? part->iov_len : BOUNCE_BYTES;
    void *way;
    if ((errno = posix_memalign(&way, ALIGNMENT_BYTES, size)) != 0)
        return -1;
    const ssize_t moved = move_through(way, size, is_read, fd, part->iov_base, offset);
    const int error = errno;
    free(way);
    errno = error;
    return moved;
}

static ssize_t read_some(int fd, const struct iovec *parts, size_t count, off_t offset)
{
    if (count > 1)
        return preadv(fd, parts, (int)count, offset);
    const ssize_t moved = mzd_io.read(fd, parts->iov_base, parts->iov_len, offset);
    return moved < 0 && is_memory_refused(parts, errno) ? move_by_way(true, fd, parts, offset) : moved;
}

static ssize_t write_some(int fd, const struct iovec *parts, size_t count, off_t offset)
{
    if (count > 1)
        return pwritev(fd, parts, (int)count, offset);
    const ssize_t moved = mzd_io.write(fd, parts->iov_base, parts->iov_len, offset);
    return moved < 0 && is_memory_refused(parts, errno) ? move_by_way(false, fd, parts, offset) : moved;
}

/* After a short direct read at the end of a file the next offset is unaligned, and some file systems then say
 * EINVAL where others say 0 bytes. */
static bool is_at_end(int fd, off_t offset)
{
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && offset >= status.st_size;
}

/* The index of the extent at a place; always forwards in the file. */
static size_t index_at(const transfer *work, size_t position)
{
    return work->is_reversed ? work->run_start + work->run_end - 1 - position : position;
}

static off_t current_offset(const transfer *work)
{
    return (off_t)(work->extents[index_at(work, work->position)].offset_bytes + (int64_t)work->done);
}

static int result_of_error(const transfer *work, int error)
{
    if (error == EINVAL && work->done > 0 && is_at_end(work->fd, current_offset(work)))
        return MZD_IO_SHORT;
    return -error;
}

static bool touch(const mzd_extent *first, const mzd_extent *second)
{
    const bool has_content = first->size_bytes > 0 && second->size_bytes > 0;
    return has_content && first->offset_bytes + (int64_t)first->size_bytes == second->offset_bytes;
}

/* The longest run from the current place on. Backwards too: eviction writes the rearmost chunk first. */
static void find_run(transfer *work)
{
    const mzd_extent *extents = work->extents;
    size_t end = work->position + 1;
    work->run_start = work->position;
    work->is_reversed = end < work->count && touch(&extents[end], &extents[end - 1]);
    while (end < work->count && (work->is_reversed ? touch(&extents[end], &extents[end - 1])
                                                   : touch(&extents[end - 1], &extents[end])))
        end++;
    work->run_end = end;
}

/* What the next call moves: the rest of the current extent, and what follows it in the run, up to a piece. */
static size_t gather(const transfer *work, struct iovec *parts)
{
    const size_t parts_max = work->position < work->alone_until ? 1 : work->parts_max;
    size_t count = 0, room = MZD_IO_PIECE_BYTES, done = work->done;
    for (size_t at = work->position; at < work->run_end && count < parts_max && room > 0; at++) {
        const mzd_extent *extent = &work->extents[index_at(work, at)];
        const size_t left = extent->size_bytes - done;
        const size_t size = left < room ? left : room;
        parts[count++] = (struct iovec){extent->address + done, size};
        room -= size;
        done = 0;
    }
    return count;
}

/* The current extent has its result; on to the next. */
static void settle(transfer *work, int result)
{
    work->results[index_at(work, work->position++)] = result;
    work->done = 0;
}

/* The bytes that a call has moved belong to the current extent and those after it. */
static void advance(transfer *work, size_t moved)
{
    while (moved > 0) {
        const size_t index = index_at(work, work->position);
        const mzd_extent *extent = &work->extents[index];
        const size_t left = extent->size_bytes - work->done;
        const size_t size = left < moved ? left : moved;
        if (work->crcs != NULL)
            work->crcs[index] = mzd_crc32c(work->crcs[index], extent->address + work->done, size);
        work->done += size;
        moved -= size;
        if (work->done == extent->size_bytes)
            settle(work, 0);
    }
}

static void step(transfer *work)
{
    struct iovec parts[MZD_IO_PARTS_MAX];
    const size_t count = gather(work, parts);
    const ssize_t moved = work->some(work->fd, parts, count, current_offset(work));
    if (moved > 0)
        advance(work, (size_t)moved);
    else if (moved == 0)
        settle(work, MZD_IO_SHORT);
    else if (errno == EINTR)
        return; /* once more */
    else if (count > 1)
        work->alone_until = work->position + count; /* which of them is at fault, only each can tell */
    else
        settle(work, result_of_error(work, errno));
}

static void transfer_extents(transfer work)
{
    while (work.position < work.count) {
        if (work.position == work.run_end)
            find_run(&work);
        if (work.extents[work.position].size_bytes == 0) /* a run of its own */
            settle(&work, 0);
        else
            step(&work);
    }
}

void mzd_read_extents(int fd, const mzd_extent *extents, size_t count, uint32_t *crcs, int32_t *results)
{
    transfer_extents((transfer){
        .some = read_some,
        .fd = fd,
        .extents = extents,
        .count = count,
        .parts_max = mzd_io.read == pread ? MZD_IO_PARTS_MAX : 1,
        .crcs = crcs,
        .results = results,
    });
}

void mzd_write_extents(int fd, const mzd_extent *extents, size_t count, uint32_t *crcs, int32_t *results)
{
    transfer_extents((transfer){
        .some = write_some,
        .fd = fd,
        .extents = extents,
        .count = count,
        .parts_max = mzd_io.write == pwrite ? MZD_IO_PARTS_MAX : 1,
        .crcs = crcs,
        .results = results,
    });
}

int mzd_read_extent(int fd, const mzd_extent *extent, uint32_t *crc)
{
    int32_t result;
    mzd_read_extents(fd, extent, 1, crc, &result);
    return result;
}

int mzd_write_extent(int fd, const mzd_extent *extent, uint32_t *crc)
{
    int32_t result;
    mzd_write_extents(fd, extent, 1, crc, &result);
    return result;
}
