/* Owns the module `mzd._native`: which functions and constants it has. */
#include "bindings.h"

#include "crc32c.h"
#include "extent_io.h"
#include "int8_codec.h"
#include "pages.h"

static int add_constants(PyObject *module)
{
    const struct {
        const char *name;
        long value;
    } constants[] = {
        {"INT8_GROUP", MZD_INT8_GROUP},
        {"INT8_OK", MZD_INT8_OK},
        {"INT8_NOT_FINITE", MZD_INT8_NOT_FINITE},
        {"INT8_NOT_RELEASED", MZD_INT8_NOT_RELEASED},
        {"EXTENT_SHORT", MZD_IO_SHORT},
        {"PAGE_BYTES", (long)mzd_page_bytes()}, /* this kernel's: 4, 16 or 64 KiB */
    };
    for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) != 0)
            return -1;
    return 0;
}

static int execute(PyObject *module)
{
    mzd_crc32c_variants(); /* builds tables, before any thread reads them */
    if (PyModule_AddFunctions(module, mzd_codec_methods) != 0 ||
        PyModule_AddFunctions(module, mzd_io_methods) != 0 ||
        PyModule_AddFunctions(module, mzd_page_methods) != 0 ||
        PyModule_AddFunctions(module, mzd_launch_methods) != 0)
        return -1;
    return add_constants(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mzd._native",
    .m_doc = "KV codec, extent I/O, checksums, page work and kernel launches in C, all without the GIL.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
