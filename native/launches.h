/* Owns the contract of enqueuing a row of OpenCL kernels at once. Knows no OpenCL header and no library: the
 * one function that it calls is handed over. */
#ifndef MZD_LAUNCHES_H
#define MZD_LAUNCHES_H

#include <stddef.h>
#include <stdint.h>

enum { MZD_LAUNCH_DIMENSIONS_MAX = 3 };

/* clEnqueueNDRangeKernel, its handles as plain pointers. */
typedef int32_t (*mzd_enqueue_kernel)(void *queue, void *kernel, uint32_t dimensions, const size_t *offset,
                                      const size_t *global_size, const size_t *local_size,
                                      uint32_t num_events, const void *events, void *event);

/* One launch, as Python lays it out: eight words. */
typedef struct {
    uint64_t kernel;
    uint64_t dimensions; /* 1 to MZD_LAUNCH_DIMENSIONS_MAX */
    uint64_t global_size[MZD_LAUNCH_DIMENSIONS_MAX];
    uint64_t local_size[MZD_LAUNCH_DIMENSIONS_MAX]; /* the first 0: the driver chooses */
} mzd_launch;

/* Enqueue in order, without events, up to the first that is refused. Returns how many were taken; `status` is
 * that of the last call, 0 if there was none. */
size_t mzd_enqueue_launches(mzd_enqueue_kernel enqueue, void *queue, const mzd_launch *launches, size_t count,
                            int32_t *status);

#endif
