/* Owns the faults that tests inject between the extent loops and the kernel. */
#include "extent_io.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { SHORT_COUNT = -1 }; /* a kind whose call succeeds with half of what was asked */

static atomic_uint calls_made;
static unsigned fault_period;
static int fault_error; /* errno of a faulty call, or SHORT_COUNT */

static bool is_faulty_call(void)
{
    return (atomic_fetch_add(&calls_made, 1) + 1) % fault_period == 0;
}

/* The size a faulty call may still move; 0 if it fails, with errno set. */
static size_t size_of_faulty_call(size_t size)
{
    if (fault_error == SHORT_COUNT)
        return size > 1 ? size / 2 : size;
    errno = fault_error;
    return 0;
}

static ssize_t faulty_read(int fd, void *data, size_t size, off_t offset)
{
    const size_t allowed = is_faulty_call() ? size_of_faulty_call(size) : size;
    return allowed > 0 ? pread(fd, data, allowed, offset) : -1;
}

static ssize_t faulty_write(int fd, const void *data, size_t size, off_t offset)
{
    const size_t allowed = is_faulty_call() ? size_of_faulty_call(size) : size;
    return allowed > 0 ? pwrite(fd, data, allowed, offset) : -1;
}

int mzd_set_io_fault(unsigned every_nth, const char *kind)
{
    static const struct {
        const char *name;
        int error;
    } kinds[] = {{"short", SHORT_COUNT}, {"eintr", EINTR}, {"eio", EIO}, {"enospc", ENOSPC}};

    mzd_io = (mzd_io_calls){pread, pwrite};
    if (strcmp(kind, "none") == 0)
        return 0;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (every_nth == 0 || strcmp(kind, kinds[i].name) != 0)
            continue;
        atomic_store(&calls_made, 0);
        fault_period = every_nth;
        fault_error = kinds[i].error;
        mzd_io = (mzd_io_calls){faulty_read, faulty_write};
        return 0;
    }
    return -1;
}
