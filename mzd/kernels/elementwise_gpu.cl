// Owns what works on each activation by itself, for devices with a lane for each: -DGROUP_LANES.

#include "gates.cl"
#include "places.cl"
#include "work_group.cl"

// As gated_mul of elementwise.cl. One lane an element (global size: count, rounded up to work-groups).
COOPERATIVE kernel void gated_mul(global float* gate, global const float* up, const int count PLACES2) {
    AT(gate, 0); AT(up, 1);
    const int i = get_global_id(0);
    if (i < count) gate[i] = gated(gate[i]) * up[i];
}

// As soft_cap of elementwise.cl. One lane an element (global size: count, rounded up to work-groups).
COOPERATIVE kernel void soft_cap(global float* x, const int count, const float cap PLACES1) {
    AT(x, 0);
    const int i = get_global_id(0);
    if (i < count) x[i] = capped(x[i], cap, 2.0f * LOG2_E / cap);
}
