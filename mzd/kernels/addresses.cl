// Owns the question where the device keeps a buffer: kernels follow such addresses, which they find in tables.

// table[i] = the device's own address of `buffer`. One work-item.
kernel void address_of(global uchar* buffer, global ulong* table, int i) {
    if (get_global_id(0) == 0) table[i] = (ulong)buffer;
}

// out[i] = the first word behind the i-th address. One work-item an address.
kernel void gather(global const ulong* table, global uint* out, int count) {
    const int i = get_global_id(0);
    if (i < count) out[i] = *(global const uint*)table[i];
}
