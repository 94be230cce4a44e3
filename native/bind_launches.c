/* Owns the Python function that enqueues a row of kernels. */
#include "bindings.h"

#include "args.h"
#include "launches.h"

enum { LAUNCH_WORDS = sizeof(mzd_launch) / sizeof(uint64_t) };

static bool check_launches(const mzd_array *words)
{
    if (words->count % LAUNCH_WORDS != 0) {
        PyErr_Format(PyExc_ValueError, "launches has %zu words, no multiple of %d", words->count,
                     LAUNCH_WORDS);
        return false;
    }
    const mzd_launch *launches = words->view.buf;
    for (size_t i = 0; i < words->count / LAUNCH_WORDS; i++)
        if (launches[i].dimensions < 1 || launches[i].dimensions > MZD_LAUNCH_DIMENSIONS_MAX) {
            PyErr_Format(PyExc_ValueError, "launch %zu has %llu dimensions", i,
                         (unsigned long long)launches[i].dimensions);
            return false;
        }
    return true;
}

static PyObject *enqueue_launches(PyObject *self, PyObject *args)
{
    (void)self;
    uint64_t function, queue;
    PyObject *object;
    mzd_array words = {0};
    if (!PyArg_ParseTuple(args, "O&O&O", mzd_arg_u64, &function, mzd_arg_u64, &queue, &object) ||
        !mzd_check_range(function, 1, 1, "function") ||
        !mzd_array_get(&words, object, "launches", sizeof(uint64_t), false))
        return NULL;
    if (!check_launches(&words)) {
        mzd_array_release(&words);
        return NULL;
    }
    size_t num_enqueued;
    int32_t status;
    Py_BEGIN_ALLOW_THREADS
    num_enqueued = mzd_enqueue_launches((mzd_enqueue_kernel)(uintptr_t)function, (void *)(uintptr_t)queue,
                                        words.view.buf, words.count / LAUNCH_WORDS, &status);
    Py_END_ALLOW_THREADS
    mzd_array_release(&words);
    return Py_BuildValue("(ni)", (Py_ssize_t)num_enqueued, (int)status);
}

PyMethodDef mzd_launch_methods[] = {
    {"enqueue_launches", enqueue_launches, METH_VARARGS,
     "enqueue_launches(function, queue, launches, /)\n--\n\n"
     "Enqueue kernels in order up to the first that is refused: (how many were taken, the last status)."},
    {NULL, NULL, 0, NULL},
};
