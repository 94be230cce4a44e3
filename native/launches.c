/* Implements launches.h. */
#include "launches.h"

static int32_t enqueue_one(mzd_enqueue_kernel enqueue, void *queue, const mzd_launch *launch)
{
    size_t global_size[MZD_LAUNCH_DIMENSIONS_MAX], local_size[MZD_LAUNCH_DIMENSIONS_MAX];
    for (uint64_t i = 0; i < launch->dimensions; i++) { /* words to size_t, which may be narrower */
        global_size[i] = (size_t)launch->global_size[i];
        local_size[i] = (size_t)launch->local_size[i];
    }
    return enqueue(queue, (void *)(uintptr_t)launch->kernel, (uint32_t)launch->dimensions, NULL, global_size,
                   launch->local_size[0] == 0 ? NULL : local_size, 0, NULL, NULL);
}

size_t mzd_enqueue_launches(mzd_enqueue_kernel enqueue, void *queue, const mzd_launch *launches, size_t count,
                            int32_t *status)
{
    *status = 0;
    for (size_t i = 0; i < count; i++) {
        *status = enqueue_one(enqueue, queue, &launches[i]);
        if (*status != 0)
            return i;
    }
    return count;
}
