/* Implements args.h; messages name the argument, what was wanted and what came. */
#include "args.h"

#include <string.h>

static bool fits(PyObject *object, unsigned long long max, unsigned long long *value)
{
    PyObject *index = PyNumber_Index(object); /* NumPy integers too */
    if (index == NULL)
        return false;
    *value = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    const bool has_failed = PyErr_Occurred() != NULL;
    if (has_failed && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return false;
    if (has_failed || *value > max) {
        PyErr_Format(PyExc_ValueError, "%R is not in 0..%llu", object, max);
        return false;
    }
    return true;
}

int mzd_arg_u64(PyObject *object, void *out_uint64)
{
    unsigned long long value;
    if (!fits(object, UINT64_MAX, &value))
        return 0;
    *(uint64_t *)out_uint64 = value;
    return 1;
}

int mzd_arg_size(PyObject *object, void *out_size)
{
    unsigned long long value;
    if (!fits(object, (unsigned long long)PY_SSIZE_T_MAX, &value))
        return 0;
    *(size_t *)out_size = (size_t)value;
    return 1;
}

int mzd_arg_u32(PyObject *object, void *out_uint32)
{
    unsigned long long value;
    if (!fits(object, UINT32_MAX, &value))
        return 0;
    *(uint32_t *)out_uint32 = (uint32_t)value;
    return 1;
}

/* Whether a struct format names one unsigned integer in this CPU's byte order. */
static bool is_native_unsigned(const char *format)
{
    const uint16_t one = 1;
    const char native_order = *(const char *)&one == 1 ? '<' : '>';
    if (*format == '@' || *format == '=' || *format == native_order)
        format++;
    return *format != '\0' && strchr("BHILQ", *format) != NULL && format[1] == '\0';
}

bool mzd_array_get(mzd_array *out, PyObject *object, const char *name, size_t item_bytes, bool is_writable)
{
    const int flags = PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (is_writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &out->view, flags) != 0)
        return false;
    const Py_buffer *view = &out->view;
    const bool is_wanted = view->ndim == 1 && (size_t)view->itemsize == item_bytes && view->format != NULL &&
                           is_native_unsigned(view->format);
    if (!is_wanted) {
        PyErr_Format(PyExc_ValueError, "%s must be a one-dimensional array of uint%zu", name, item_bytes * 8);
        mzd_array_release(out);
        return false;
    }
    out->count = (size_t)view->len / item_bytes;
    return true;
}

void mzd_array_release(mzd_array *array)
{
    PyBuffer_Release(&array->view); /* does nothing if it holds no object */
    array->count = 0;
}

bool mzd_same_length(const mzd_array *a, const char *a_name, const mzd_array *b, const char *b_name)
{
    if (a->count == b->count)
        return true;
    PyErr_Format(PyExc_ValueError, "%s has %zu items and %s has %zu", a_name, a->count, b_name, b->count);
    return false;
}

bool mzd_check_range(uint64_t address, size_t size, size_t alignment, const char *name)
{
    if (size == 0)
        return true;
    if (address == 0)
        PyErr_Format(PyExc_ValueError, "%s is a null address", name);
    else if (address > UINTPTR_MAX || size > UINTPTR_MAX - address)
        PyErr_Format(PyExc_ValueError, "%s: %zu bytes at %llu wrap around the address space", name, size,
                     (unsigned long long)address);
    else if (address % alignment != 0)
        PyErr_Format(PyExc_ValueError, "%s: address %llu is not a multiple of %zu", name,
                     (unsigned long long)address, alignment);
    else
        return true;
    return false;
}

bool mzd_check_ranges(const mzd_array *addresses, size_t size, size_t alignment, const char *name)
{
    for (size_t i = 0; i < addresses->count; i++)
        if (!mzd_check_range(mzd_u64_items(addresses)[i], size, alignment, name))
            return false;
    return true;
}
