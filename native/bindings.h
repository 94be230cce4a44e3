/* Owns the lists of Python functions that each binding file gives to the module. */
#ifndef MZD_BINDINGS_H
#define MZD_BINDINGS_H

#include <Python.h>

extern PyMethodDef mzd_codec_methods[];
extern PyMethodDef mzd_io_methods[];
extern PyMethodDef mzd_page_methods[];
extern PyMethodDef mzd_launch_methods[];

/* Results for a caller to compare with, as module attributes. */
enum {
    MZD_INT8_OK = 0,
    MZD_INT8_NOT_FINITE = 1,   /* an infinity or NaN: store this chunk as it is */
    MZD_INT8_NOT_RELEASED = 2, /* encoded, but the kernel kept the pages */
};

#endif
