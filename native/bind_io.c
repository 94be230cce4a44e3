/* Owns the Python functions of extent I/O and checksums. */
#include "bindings.h"

#include <string.h>

#include "args.h"
#include "crc32c.h"
#include "extent_io.h"

typedef struct {
    int fd;
    mzd_array offsets, addresses, sizes;
    mzd_array crcs, seeds; /* empty if not asked for */
    mzd_extent *extents;
    int32_t *results;
} transfer_batch;

typedef void (*extents_call)(int fd, const mzd_extent *extents, size_t count, uint32_t *crcs,
                             int32_t *results);

static void batch_release(transfer_batch *work)
{
    mzd_array_release(&work->offsets);
    mzd_array_release(&work->addresses);
    mzd_array_release(&work->sizes);
    mzd_array_release(&work->crcs);
    mzd_array_release(&work->seeds);
    PyMem_Free(work->extents);
    PyMem_Free(work->results);
}

static bool get_places(transfer_batch *work, PyObject *offsets, PyObject *addresses, PyObject *sizes)
{
    return mzd_array_get(&work->offsets, offsets, "offsets", sizeof(uint64_t), false) &&
           mzd_array_get(&work->addresses, addresses, "addresses", sizeof(uint64_t), false) &&
           mzd_array_get(&work->sizes, sizes, "sizes", sizeof(uint64_t), false) &&
           mzd_same_length(&work->offsets, "offsets", &work->addresses, "addresses") &&
           mzd_same_length(&work->offsets, "offsets", &work->sizes, "sizes");
}

static bool get_checksums(transfer_batch *work, PyObject *crc_out, PyObject *seeds)
{
    if (crc_out == Py_None && seeds != Py_None) {
        PyErr_SetString(PyExc_ValueError, "seeds without crc_out");
        return false;
    }
    if (crc_out == Py_None)
        return true;
    if (!mzd_array_get(&work->crcs, crc_out, "crc_out", sizeof(uint32_t), true) ||
        !mzd_same_length(&work->offsets, "offsets", &work->crcs, "crc_out"))
        return false;
    if (seeds == Py_None)
        return true;
    return mzd_array_get(&work->seeds, seeds, "seeds", sizeof(uint32_t), false) &&
           mzd_same_length(&work->offsets, "offsets", &work->seeds, "seeds");
}

static bool check_extents(const transfer_batch *work)
{
    for (size_t i = 0; i < work->offsets.count; i++) {
        const uint64_t offset = mzd_u64_items(&work->offsets)[i], size = mzd_u64_items(&work->sizes)[i];
        if (offset > INT64_MAX || size > INT64_MAX - offset || size > PY_SSIZE_T_MAX) {
            PyErr_Format(PyExc_ValueError, "extent %zu: %llu bytes at %llu end past any file", i,
                         (unsigned long long)size, (unsigned long long)offset);
            return false;
        }
        if (!mzd_check_range(mzd_u64_items(&work->addresses)[i], (size_t)size, 1, "addresses"))
            return false;
    }
    return true;
}

static void start_checksums(transfer_batch *work)
{
    if (work->crcs.view.obj == NULL)
        return;
    if (work->seeds.view.obj != NULL)
        memcpy(work->crcs.view.buf, work->seeds.view.buf, work->crcs.count * sizeof(uint32_t));
    else
        memset(work->crcs.view.buf, 0, work->crcs.count * sizeof(uint32_t));
}

static void list_extents(const transfer_batch *work)
{
    for (size_t i = 0; i < work->offsets.count; i++)
        work->extents[i] = (mzd_extent){
            .offset_bytes = (int64_t)mzd_u64_items(&work->offsets)[i],
            .address = (uint8_t *)(uintptr_t)mzd_u64_items(&work->addresses)[i],
            .size_bytes = (size_t)mzd_u64_items(&work->sizes)[i],
        };
}

static PyObject *list_of_results(const transfer_batch *work)
{
    PyObject *list = PyList_New((Py_ssize_t)work->offsets.count);
    for (size_t i = 0; list != NULL && i < work->offsets.count; i++) {
        PyObject *item = PyLong_FromLong(work->results[i]);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, item); /* takes the reference */
    }
    return list;
}

static PyObject *run_batch(transfer_batch *work, extents_call call)
{
    const size_t count = work->offsets.count;
    work->extents = PyMem_Calloc(count + 1, sizeof(mzd_extent));
    work->results = PyMem_Calloc(count + 1, sizeof(int32_t));
    if (work->extents == NULL || work->results == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    list_extents(work);
    start_checksums(work);
    call(work->fd, work->extents, count, work->crcs.view.buf, work->results);
    Py_END_ALLOW_THREADS
    return list_of_results(work);
}

static PyObject *transfer_extents(PyObject *args, PyObject *kwargs, extents_call call)
{
    static char *names[] = {"fd", "offsets", "addresses", "sizes", "crc_out", "seeds", NULL};
    PyObject *offsets, *addresses, *sizes, *crc_out = Py_None, *seeds = Py_None, *list = NULL;
    transfer_batch work = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOOO|OO", names, &work.fd, &offsets, &addresses, &sizes,
                                     &crc_out, &seeds))
        return NULL;
    if (get_places(&work, offsets, addresses, sizes) && get_checksums(&work, crc_out, seeds) &&
        check_extents(&work))
        list = run_batch(&work, call);
    batch_release(&work);
    return list;
}

static PyObject *read_extents(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)self;
    return transfer_extents(args, kwargs, mzd_read_extents);
}

static PyObject *write_extents(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)self;
    return transfer_extents(args, kwargs, mzd_write_extents);
}

static PyObject *set_io_fault(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned every_nth;
    const char *kind;
    if (!PyArg_ParseTuple(args, "Is", &every_nth, &kind))
        return NULL;
    if (mzd_set_io_fault(every_nth, kind) != 0)
        return PyErr_Format(PyExc_ValueError, "no fault '%s' every %u calls", kind, every_nth);
    Py_RETURN_NONE;
}

static mzd_crc32c_function variant_named(const char *name)
{
    const mzd_crc32c_variant *variant = mzd_crc32c_variants();
    if (strcmp(name, "auto") == 0)
        return variant->update;
    while (variant->name != NULL && strcmp(variant->name, name) != 0)
        variant++;
    if (variant->name == NULL)
        PyErr_Format(PyExc_ValueError, "this CPU has no crc32c variant '%s'", name);
    return variant->update;
}

static PyObject *crc_without_gil(mzd_crc32c_function update, uint32_t crc, const void *data, size_t size)
{
    Py_BEGIN_ALLOW_THREADS
    crc = update(crc, data, size);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *crc32c(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"address", "size", "seed", "variant", NULL};
    (void)self;
    uint64_t address;
    size_t size;
    uint32_t seed = 0;
    const char *name = "auto";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&s", names, mzd_arg_u64, &address, mzd_arg_size,
                                     &size, mzd_arg_u32, &seed, &name))
        return NULL;
    const mzd_crc32c_function update = variant_named(name);
    if (update == NULL || !mzd_check_range(address, size, 1, "address"))
        return NULL;
    return crc_without_gil(update, seed, (const void *)(uintptr_t)address, size);
}

static PyObject *crc32c_buffer(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "seed", "variant", NULL};
    (void)self;
    PyObject *data;
    uint32_t seed = 0;
    const char *name = "auto";
    Py_buffer view;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O&s", names, &data, mzd_arg_u32, &seed, &name))
        return NULL;
    const mzd_crc32c_function update = variant_named(name);
    if (update == NULL || PyObject_GetBuffer(data, &view, PyBUF_C_CONTIGUOUS) != 0)
        return NULL;
    PyObject *crc = crc_without_gil(update, seed, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return crc;
}

static PyObject *crc32c_variants(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    const mzd_crc32c_variant *variants = mzd_crc32c_variants();
    return variants[1].name == NULL ? Py_BuildValue("[s]", variants[0].name)
                                    : Py_BuildValue("[ss]", variants[0].name, variants[1].name);
}

#define WITH_KEYWORDS METH_VARARGS | METH_KEYWORDS
#define FUNCTION(name) #name, (PyCFunction)(void (*)(void))name

PyMethodDef mzd_io_methods[] = {
    {FUNCTION(read_extents), WITH_KEYWORDS,
     "read_extents(fd, offsets, addresses, sizes, crc_out=None, seeds=None)\n--\n\n"
     "Read each extent of a file to memory; a list of 0, -errno or EXTENT_SHORT."},
    {FUNCTION(write_extents), WITH_KEYWORDS,
     "write_extents(fd, offsets, addresses, sizes, crc_out=None, seeds=None)\n--\n\n"
     "Write each extent from memory; a list of 0, -errno or EXTENT_SHORT."},
    {FUNCTION(crc32c), WITH_KEYWORDS,
     "crc32c(address, size, seed=0, variant='auto')\n--\n\nCRC-32C of memory, continued from seed."},
    {FUNCTION(crc32c_buffer), WITH_KEYWORDS,
     "crc32c_buffer(data, seed=0, variant='auto')\n--\n\nCRC-32C of a contiguous buffer, continued from "
     "seed."},
    {"crc32c_variants", crc32c_variants, METH_NOARGS,
     "crc32c_variants()\n--\n\nNames of the variants that this CPU runs, fastest first."},
    {"_set_io_fault", set_io_fault, METH_VARARGS,
     "_set_io_fault(every_nth, kind, /)\n--\n\n"
     "For tests: every nth pread or pwrite fails as 'short', 'eintr', 'eio' or 'enospc'; 'none' ends it."},
    {NULL, NULL, 0, NULL},
};
