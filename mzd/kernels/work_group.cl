// Owns what the lanes of a work-group compute together; GROUP_LANES, a power of two, is how many there are.

#include "vector.cl"

#define COOPERATIVE __attribute__((reqd_work_group_size(GROUP_LANES, 1, 1)))
#define LOCAL_BARRIER barrier(CLK_LOCAL_MEM_FENCE)

// The sum of every lane's x, for all of them. `scratch` has a float for each lane; nobody may still need it.
static inline float group_sum(local float* scratch, float x) {
    const int lane = get_local_id(0);
    scratch[lane] = x;
    for (int half_lanes = GROUP_LANES / 2; half_lanes > 0; half_lanes /= 2) {
        LOCAL_BARRIER;
        if (lane < half_lanes) scratch[lane] += scratch[lane + half_lanes];
    }
    LOCAL_BARRIER;
    const float sum = scratch[0];
    LOCAL_BARRIER;  // before anybody writes there again
    return sum;
}

// The largest x, otherwise as group_sum.
static inline float group_max(local float* scratch, float x) {
    const int lane = get_local_id(0);
    scratch[lane] = x;
    for (int half_lanes = GROUP_LANES / 2; half_lanes > 0; half_lanes /= 2) {
        LOCAL_BARRIER;
        if (lane < half_lanes) scratch[lane] = fmax(scratch[lane], scratch[lane + half_lanes]);
    }
    LOCAL_BARRIER;
    const float largest = scratch[0];
    LOCAL_BARRIER;
    return largest;
}
