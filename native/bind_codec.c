/* Owns the Python functions of the int8 codec: batches, checked first, worked on without the GIL. */
#include "bindings.h"

#include "args.h"
#include "int8_codec.h"
#include "pages.h"

typedef struct {
    mzd_array src, dst, status; /* status is empty for decoding */
    size_t num_elements;
    size_t release_bytes; /* of each source once encoded; 0 keeps it */
    const mzd_int8_variant *variant;
} batch;

static size_t chunk_bytes(const batch *work)
{
    return work->num_elements * sizeof(uint16_t);
}

static void batch_release(batch *work)
{
    mzd_array_release(&work->src);
    mzd_array_release(&work->dst);
    mzd_array_release(&work->status);
}

static bool check_num_elements(size_t num_elements)
{
    if (num_elements > 0 && num_elements % MZD_INT8_GROUP == 0 && num_elements <= PY_SSIZE_T_MAX / 4)
        return true;
    PyErr_Format(PyExc_ValueError, "num_elements must be a positive multiple of %d, not %zu", MZD_INT8_GROUP,
                 num_elements);
    return false;
}

static bool choose_variant(batch *work, const char *name)
{
    work->variant = mzd_int8_variant_named(name);
    if (work->variant == NULL)
        PyErr_Format(PyExc_ValueError, "this CPU has no int8 variant '%s'", name);
    return work->variant != NULL;
}

/* Ranges of one chunk must not touch; other pairs are the caller's promise. */
static bool check_apart(const batch *work, size_t src_bytes, size_t dst_bytes)
{
    for (size_t i = 0; i < work->src.count; i++) {
        const uint64_t src = mzd_u64_items(&work->src)[i], dst = mzd_u64_items(&work->dst)[i];
        if (src < dst + dst_bytes && dst < src + src_bytes) {
            PyErr_Format(PyExc_ValueError, "src and dst of chunk %zu overlap", i);
            return false;
        }
    }
    return true;
}

static bool check_addresses(const batch *work, size_t src_bytes, size_t dst_bytes)
{
    return mzd_same_length(&work->src, "src", &work->dst, "dst") &&
           mzd_check_ranges(&work->src, src_bytes, sizeof(uint16_t), "src") &&
           mzd_check_ranges(&work->dst, dst_bytes, sizeof(uint16_t), "dst") &&
           check_apart(work, src_bytes, dst_bytes);
}

static bool get_addresses(batch *work, PyObject *src, PyObject *dst)
{
    return mzd_array_get(&work->src, src, "src", sizeof(uint64_t), false) &&
           mzd_array_get(&work->dst, dst, "dst", sizeof(uint64_t), false);
}

static bool check_encode(batch *work, PyObject *src, PyObject *dst, PyObject *status)
{
    if (!check_num_elements(work->num_elements) || !get_addresses(work, src, dst) ||
        !mzd_array_get(&work->status, status, "status", sizeof(uint8_t), true) ||
        !mzd_same_length(&work->src, "src", &work->status, "status"))
        return false;
    const size_t src_bytes =
        chunk_bytes(work) > work->release_bytes ? chunk_bytes(work) : work->release_bytes;
    return check_addresses(work, src_bytes, mzd_int8_payload_bytes(work->num_elements));
}

static uint8_t encode_one(const batch *work, size_t i)
{
    uint8_t *src = (uint8_t *)(uintptr_t)mzd_u64_items(&work->src)[i];
    uint8_t *dst = (uint8_t *)(uintptr_t)mzd_u64_items(&work->dst)[i];
    if (!work->variant->encode((const uint16_t *)src, dst, work->num_elements))
        return MZD_INT8_NOT_FINITE;
    if (work->release_bytes > 0 && mzd_release_inside(src, work->release_bytes) != 0)
        return MZD_INT8_NOT_RELEASED;
    return MZD_INT8_OK;
}

static PyObject *encode_batch(batch *work, PyObject *src, PyObject *dst, PyObject *status,
                              const char *variant)
{
    PyObject *result = NULL;
    if (choose_variant(work, variant) && check_encode(work, src, dst, status)) {
        uint8_t *statuses = work->status.view.buf;
        Py_BEGIN_ALLOW_THREADS
        for (size_t i = 0; i < work->src.count; i++)
            statuses[i] = encode_one(work, i);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    batch_release(work);
    return result;
}

static PyObject *int8_encode_batch(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"src", "dst", "num_elements", "status", "variant", NULL};
    (void)self;
    PyObject *src, *dst, *status;
    const char *variant = "auto";
    batch work = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO&O|s", names, &src, &dst, mzd_arg_size,
                                     &work.num_elements, &status, &variant))
        return NULL;
    return encode_batch(&work, src, dst, status, variant);
}

static PyObject *int8_encode_release_batch(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"src", "dst", "num_elements", "release_bytes", "status", "variant", NULL};
    (void)self;
    PyObject *src, *dst, *status;
    const char *variant = "auto";
    batch work = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO&O&O|s", names, &src, &dst, mzd_arg_size,
                                     &work.num_elements, mzd_arg_size, &work.release_bytes, &status,
                                     &variant))
        return NULL;
    return encode_batch(&work, src, dst, status, variant);
}

static void decode_all(const batch *work)
{
    for (size_t i = 0; i < work->src.count; i++)
        work->variant->decode((const uint8_t *)(uintptr_t)mzd_u64_items(&work->src)[i],
                              (uint16_t *)(uintptr_t)mzd_u64_items(&work->dst)[i], work->num_elements);
}

static PyObject *int8_decode_batch(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"src", "dst", "num_elements", "variant", NULL};
    (void)self;
    PyObject *src, *dst, *result = NULL;
    const char *variant = "auto";
    batch work = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO&|s", names, &src, &dst, mzd_arg_size,
                                     &work.num_elements, &variant))
        return NULL;
    if (choose_variant(&work, variant) && check_num_elements(work.num_elements) &&
        get_addresses(&work, src, dst) &&
        check_addresses(&work, mzd_int8_payload_bytes(work.num_elements), chunk_bytes(&work))) {
        Py_BEGIN_ALLOW_THREADS
        decode_all(&work);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    batch_release(&work);
    return result;
}

static PyObject *int8_payload_bytes(PyObject *self, PyObject *argument)
{
    (void)self;
    size_t num_elements;
    if (!mzd_arg_size(argument, &num_elements) || !check_num_elements(num_elements))
        return NULL;
    return PyLong_FromSize_t(mzd_int8_payload_bytes(num_elements));
}

static PyObject *int8_variants(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    PyObject *names = PyList_New(0);
    for (const mzd_int8_variant *const *variant = mzd_int8_variants(); *variant != NULL && names != NULL;
         variant++) {
        PyObject *name = PyUnicode_FromString((*variant)->name);
        if (name == NULL || PyList_Append(names, name) != 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

#define WITH_KEYWORDS METH_VARARGS | METH_KEYWORDS

PyMethodDef mzd_codec_methods[] = {
    {"int8_encode_batch", (PyCFunction)(void (*)(void))int8_encode_batch, WITH_KEYWORDS,
     "int8_encode_batch(src, dst, num_elements, status, variant='auto')\n--\n\n"
     "Encode each FP16 chunk at src[i] into the payload at dst[i]; status[i] becomes INT8_OK or "
     "INT8_NOT_FINITE."},
    {"int8_encode_release_batch", (PyCFunction)(void (*)(void))int8_encode_release_batch, WITH_KEYWORDS,
     "int8_encode_release_batch(src, dst, num_elements, release_bytes, status, variant='auto')\n--\n\n"
     "As int8_encode_batch, and give back the whole pages in release_bytes from src[i] before the next "
     "chunk."},
    {"int8_decode_batch", (PyCFunction)(void (*)(void))int8_decode_batch, WITH_KEYWORDS,
     "int8_decode_batch(src, dst, num_elements, variant='auto')\n--\n\n"
     "Decode each payload at src[i] into the FP16 chunk at dst[i]."},
    {"int8_payload_bytes", int8_payload_bytes, METH_O,
     "int8_payload_bytes(num_elements, /)\n--\n\nSize of the payload of a chunk."},
    {"int8_variants", int8_variants, METH_NOARGS,
     "int8_variants()\n--\n\nNames of the variants that this CPU runs, fastest first."},
    {NULL, NULL, 0, NULL},
};
