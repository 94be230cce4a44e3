// Owns how the lanes of a work-group share row groups, and their sums through local memory.
//
// -DWORK_GROUP: its work-items, a power of two. `lanes` of them, a power of two too, take one row group
// together, so that WORK_GROUP / lanes row groups lie side by side in a work-group.

#include "work_item.cl"

#define COOPERATIVE __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1)))

// The place of this work-item. The work-groups of dimension 0 go through the row groups together:
//     for (int first = share.first; first < groups; first += share.stride)
//         row group min(first + share.own, groups - 1): past the end the last again, for the barriers' sake
typedef struct {
    int lane;  // inside the row group
    int own;   // row group inside the work-group
    int first;
    int stride;
} LaneShare;

INLINED LaneShare lane_share(int lanes) {
    LaneShare share;
    share.lane = (int)get_local_id(0) % lanes;
    share.own = (int)get_local_id(0) / lanes;
    share.first = (int)get_group_id(0) * (WORK_GROUP / lanes);
    share.stride = (int)get_num_groups(0) * (WORK_GROUP / lanes);
    return share;
}

#define EXCHANGE_QUADS 8  // at a time: 16 KiB for 256 work-items, half of what the smallest GPUs have
#define EXCHANGE_FLOAT4S(count) (((count) < EXCHANGE_QUADS ? (count) : EXCHANGE_QUADS) * (WORK_GROUP / 2))

// Adds `count` quads over the lanes of each row group: the first `results` lanes get the sums of every
// `results`-th. All work-items of the work-group take part. exchange: EXCHANGE_FLOAT4S(count).
INLINED void sum_lanes(
    float4 *sums, local float4 *exchange, int lane, int lanes, const int results, const int count) {
    local float4 *own = exchange + ((int)get_local_id(0) - lane) / 2;
    UNROLL for (int first = 0; first < count; first += EXCHANGE_QUADS) {
        const int quads = min(count - first, EXCHANGE_QUADS);
        for (int half_lanes = lanes / 2; half_lanes >= results; half_lanes /= 2) {
            if (lane >= half_lanes && lane < 2 * half_lanes)
                UNROLL for (int i = 0; i < quads; i++)
                    own[i * (WORK_GROUP / 2) + lane - half_lanes] = sums[first + i];
            barrier(CLK_LOCAL_MEM_FENCE);
            if (lane < half_lanes)
                UNROLL for (int i = 0; i < quads; i++)
                    sums[first + i] += own[i * (WORK_GROUP / 2) + lane];
            barrier(CLK_LOCAL_MEM_FENCE);
        }
    }
}
