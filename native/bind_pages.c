/* Owns the Python functions of page-level memory work. */
#include "bindings.h"

#include <limits.h>
#include <string.h>

#include "args.h"
#include "pages.h"

typedef int (*page_call)(uint8_t *address, size_t size);

typedef struct {
    uint64_t address;
    size_t size;
} range;

static uint8_t *pointer(const range *memory)
{
    return (uint8_t *)(uintptr_t)memory->address;
}

static bool check_pages(const range *memory)
{
    const size_t page = mzd_page_bytes();
    if (memory->size % page == 0)
        return mzd_check_range(memory->address, memory->size, page, "address");
    PyErr_Format(PyExc_ValueError, "size %zu is not a multiple of the page size %zu", memory->size, page);
    return false;
}

static bool parse_pages(PyObject *args, range *memory)
{
    return PyArg_ParseTuple(args, "O&O&", mzd_arg_u64, &memory->address, mzd_arg_size, &memory->size) &&
           check_pages(memory);
}

static PyObject *call_on_pages(PyObject *args, page_call call)
{
    range memory;
    int result;
    if (!parse_pages(args, &memory))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = call(pointer(&memory), memory.size);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

static PyObject *populate(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"address", "size", "huge", NULL};
    (void)self;
    range memory;
    int huge, result;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&p", names, mzd_arg_u64, &memory.address, mzd_arg_size,
                                     &memory.size, &huge) ||
        !check_pages(&memory))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = mzd_populate(pointer(&memory), memory.size, huge != 0);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

static PyObject *release(PyObject *self, PyObject *args)
{
    (void)self;
    return call_on_pages(args, mzd_release);
}

static PyObject *lock(PyObject *self, PyObject *args)
{
    (void)self;
    return call_on_pages(args, mzd_lock);
}

static PyObject *unlock(PyObject *self, PyObject *args)
{
    (void)self;
    return call_on_pages(args, mzd_unlock);
}

static PyObject *resident_bytes(PyObject *self, PyObject *args)
{
    (void)self;
    range memory;
    size_t resident;
    int result;
    if (!parse_pages(args, &memory))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    result = mzd_resident_bytes(pointer(&memory), memory.size, &resident);
    Py_END_ALLOW_THREADS
    if (result != 0)
        return PyErr_Format(PyExc_ValueError, "mincore: %s", strerror(-result));
    return PyLong_FromSize_t(resident);
}

static PyObject *fill(PyObject *self, PyObject *args)
{
    (void)self;
    range memory;
    uint32_t byte;
    if (!PyArg_ParseTuple(args, "O&O&O&", mzd_arg_u64, &memory.address, mzd_arg_size, &memory.size,
                          mzd_arg_u32, &byte) ||
        !mzd_check_range(memory.address, memory.size, 1, "address"))
        return NULL;
    if (byte > UINT8_MAX)
        return PyErr_Format(PyExc_ValueError, "%u is no byte", byte);
    Py_BEGIN_ALLOW_THREADS
    memset(pointer(&memory), (int)byte, memory.size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *copy(PyObject *self, PyObject *args)
{
    (void)self;
    uint64_t dst, src;
    size_t size;
    if (!PyArg_ParseTuple(args, "O&O&O&", mzd_arg_u64, &dst, mzd_arg_u64, &src, mzd_arg_size, &size) ||
        !mzd_check_range(dst, size, 1, "dst") || !mzd_check_range(src, size, 1, "src"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    memmove((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *trim_heap(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    bool is_supported;
    Py_BEGIN_ALLOW_THREADS
    is_supported = mzd_trim_heap();
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_supported);
}

static PyObject *set_mmap_threshold(PyObject *self, PyObject *args)
{
    (void)self;
    uint32_t threshold_bytes;
    if (!PyArg_ParseTuple(args, "O&", mzd_arg_u32, &threshold_bytes))
        return NULL;
    if (threshold_bytes > INT_MAX)
        return PyErr_Format(PyExc_ValueError, "threshold_bytes %u is above %d", threshold_bytes, INT_MAX);
    return PyBool_FromLong(mzd_set_mmap_threshold((int)threshold_bytes));
}

PyMethodDef mzd_page_methods[] = {
    {"populate", (PyCFunction)(void (*)(void))populate, METH_VARARGS | METH_KEYWORDS,
     "populate(address, size, huge)\n--\n\n"
     "Make pages resident, in huge pages where whole ones fit and huge is true; 0 or -errno."},
    {"release", release, METH_VARARGS,
     "release(address, size, /)\n--\n\nGive pages back to the system, locked ones too; 0 or -errno."},
    {"lock", lock, METH_VARARGS,
     "lock(address, size, /)\n--\n\nKeep pages from being swapped out; 0 or -errno."},
    {"unlock", unlock, METH_VARARGS, "unlock(address, size, /)\n--\n\nUndo lock; 0 or -errno."},
    {"resident_bytes", resident_bytes, METH_VARARGS,
     "resident_bytes(address, size, /)\n--\n\nBytes of the range's pages that are in memory."},
    {"fill", fill, METH_VARARGS, "fill(address, size, byte, /)\n--\n\nSet every byte."},
    {"copy", copy, METH_VARARGS, "copy(dst, src, size, /)\n--\n\nCopy bytes; the ranges may overlap."},
    {"trim_heap", trim_heap, METH_NOARGS,
     "trim_heap()\n--\n\nGive the C library's free memory back; False where it cannot."},
    {"set_mmap_threshold", set_mmap_threshold, METH_VARARGS,
     "set_mmap_threshold(threshold_bytes, /)\n--\n\n"
     "Give blocks of at least this size a mapping of their own; False where the C library cannot."},
    {NULL, NULL, 0, NULL},
};
