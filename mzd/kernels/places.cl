// Owns how kernels find what their pointer arguments mean, in each kind of memory.
//
// Tensors lie inside units, at multiples of 64 bytes. In shared virtual memory (SVM) a kernel takes a pointer
// to a tensor. In a plain buffer it takes the buffer and the tensor's offset in it, because sub-buffers may
// not begin at 64 bytes (CL_DEVICE_MEM_BASE_ADDR_ALIGN is 512 on common GPUs) and cost an object each.
//
// A kernel's global pointers are its first parameters. Its list ends with PLACES<number of those>, and its
// body begins with AT(name, index) for each. The offsets come last and in reverse, so the offset of pointer
// `i` is the argument `number of arguments - 1 - i`, whatever stands between.

#ifdef BUFFER_PLACES
#define PLACES1 , ulong place0
#define PLACES2 , ulong place1 PLACES1
#define PLACES3 , ulong place2 PLACES2
#define PLACES4 , ulong place3 PLACES3
#define PLACES5 , ulong place4 PLACES4
#define PLACES6 , ulong place5 PLACES5
#define PLACES7 , ulong place6 PLACES6
#define PLACES8 , ulong place7 PLACES7
#define PLACES9 , ulong place8 PLACES8
#define PLACES10 , ulong place9 PLACES9
#define PLACES11 , ulong place10 PLACES10
#define PLACES12 , ulong place11 PLACES11
#define AT(pointer, index) pointer = (void global *)((size_t)pointer + place##index)
#else
#define PLACES1
#define PLACES2
#define PLACES3
#define PLACES4
#define PLACES5
#define PLACES6
#define PLACES7
#define PLACES8
#define PLACES9
#define PLACES10
#define PLACES11
#define PLACES12
#define AT(pointer, index)
#endif
