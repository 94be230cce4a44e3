/* Owns the reading and checking of Python arguments; nothing here does work. */
#ifndef MZD_ARGS_H
#define MZD_ARGS_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* "O&" converters: a Python or NumPy integer to uint64_t, size_t, uint32_t; ValueError if it does not fit. */
int mzd_arg_u64(PyObject *object, void *out_uint64);
int mzd_arg_size(PyObject *object, void *out_size);
int mzd_arg_u32(PyObject *object, void *out_uint32);

/* A one-dimensional contiguous buffer of unsigned integers, held until mzd_array_release. A zeroed one is
 * empty and may be released. */
typedef struct {
    Py_buffer view;
    size_t count;
} mzd_array;

/* Item sizes are 1, 4 or 8 bytes. TypeError or ValueError, and false, if the object is something else. */
bool mzd_array_get(mzd_array *out, PyObject *object, const char *name, size_t item_bytes, bool is_writable);
void mzd_array_release(mzd_array *array);

static inline const uint64_t *mzd_u64_items(const mzd_array *array)
{
    return array->view.buf;
}

/* ValueError unless both hold the same number of items. */
bool mzd_same_length(const mzd_array *a, const char *a_name, const mzd_array *b, const char *b_name);

/* ValueError if [address, address + size) is null, wraps around, or starts off `alignment`. Size 0 passes. */
bool mzd_check_range(uint64_t address, size_t size, size_t alignment, const char *name);

/* The same for each address of an array. */
bool mzd_check_ranges(const mzd_array *addresses, size_t size, size_t alignment, const char *name);

#endif
