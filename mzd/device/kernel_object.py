"""Owns a kernel object of the driver: making it, what it says of itself, giving it back."""

from __future__ import annotations

import ctypes
import weakref

from mzd.device.libopencl import check, libopencl

_NUM_ARGS = 0x1191
"""CL_KERNEL_NUM_ARGS, cl.h."""


class KernelObject:
    """A kernel object, released with this one.

    Not pyopencl's, which loads generated code for each from a database: 1.3 ms, and a model has a thousand.

    Args:
        program_handle: of a built program; the driver keeps it while the kernel lives.
        source_name: what it was built of, for errors.

    Attributes:
        handle: the driver's.
        name: of the function in the source.
        num_args: of that function.

    Raises:
        MzdError: ``internal``: the program has no such kernel.
    """

    def __init__(self, program_handle: int, name: str, *, source_name: str) -> None:
        library = libopencl()
        status = ctypes.c_int32()
        self.handle: int = library.clCreateKernel(program_handle, name.encode(), ctypes.byref(status))
        check(status.value, f"clCreateKernel({source_name}.cl: {name})")
        weakref.finalize(self, library.clReleaseKernel, self.handle)
        self.name = name
        self.num_args = self._count_args()

    def _count_args(self) -> int:
        count = ctypes.c_uint32()
        status = libopencl().clGetKernelInfo(
            self.handle, _NUM_ARGS, ctypes.sizeof(count), ctypes.byref(count), None
        )
        check(status, f"clGetKernelInfo({self.name})")
        return count.value
