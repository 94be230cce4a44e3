"""Owns the typed ctypes view of the libOpenCL that pyopencl has loaded, and the one check of its errors.

pyopencl covers platforms, contexts, queues and builds. What it lacks, or does with the GIL held, is here:
SVM allocation, kernel arguments by raw address, launches. ``ctypes.CDLL`` lets the GIL go for each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import pyopencl as cl

from mzd.errors import MzdError

EXEC_INFO_SVM_PTRS = 0x11B6
"""CL_KERNEL_EXEC_INFO_SVM_PTRS, cl.h."""

_CODES = {-4: "insufficient_memory", -6: "insufficient_memory"}
"""Memory object allocation failure, out of host memory: late allocation shows at the first use."""

NO_EVENTS = (0, None, None)
"""Arguments for `_EVENTS`: commands of one in-order queue need none."""

_LOST = frozenset({-2, -5, -14, -36})
"""Device not available, out of resources, failed event in a wait list, invalid command queue: after each
of these the queue's later results cannot be trusted."""

_EVENTS: list[object] = [c_uint32, c_void_p, c_void_p]
"""How every enqueued command ends: events to wait for, their list, the command's own event."""

_HOST_AND_EVENTS: list[object] = [c_void_p, *_EVENTS]

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "clSVMAlloc": (c_void_p, [c_void_p, c_uint64, c_size_t, c_uint32]),
    "clSVMFree": (None, [c_void_p, c_void_p]),
    # Program, name, status.
    "clCreateKernel": (c_void_p, [c_void_p, c_char_p, POINTER(c_int32)]),
    "clReleaseKernel": (c_int32, [c_void_p]),
    # Kernel, question, size of the answer, answer, size that it needs.
    "clGetKernelInfo": (c_int32, [c_void_p, c_uint32, c_size_t, c_void_p, POINTER(c_size_t)]),
    "clSetKernelArg": (c_int32, [c_void_p, c_uint32, c_size_t, c_void_p]),
    "clSetKernelArgSVMPointer": (c_int32, [c_void_p, c_uint32, c_void_p]),
    "clSetKernelExecInfo": (c_int32, [c_void_p, c_uint32, c_size_t, c_void_p]),
    "clEnqueueNDRangeKernel": (
        c_int32,
        [
            c_void_p,  # queue
            c_void_p,  # kernel
            c_uint32,  # dimensions
            POINTER(c_size_t),  # global offset
            POINTER(c_size_t),  # global size
            POINTER(c_size_t),  # local size
            c_uint32,  # events to wait for
            c_void_p,
            c_void_p,  # the launch's own event
        ],
    ),
    "clReleaseEvent": (c_int32, [c_void_p]),
    # Event, moment, size of the result, the result, its size.
    "clGetEventProfilingInfo": (c_int32, [c_void_p, c_uint32, c_size_t, c_void_p, c_void_p]),
    "clFlush": (c_int32, [c_void_p]),
    "clFinish": (c_int32, [c_void_p]),
    "clCreateBuffer": (c_void_p, [c_void_p, c_uint64, c_size_t, c_void_p, POINTER(c_int32)]),
    "clReleaseMemObject": (c_int32, [c_void_p]),
    # Queue, buffer, blocking, offset, size, host address, then the events.
    "clEnqueueWriteBuffer": (c_int32, [c_void_p, c_void_p, c_uint32, c_size_t, c_size_t, *_HOST_AND_EVENTS]),
    "clEnqueueReadBuffer": (c_int32, [c_void_p, c_void_p, c_uint32, c_size_t, c_size_t, *_HOST_AND_EVENTS]),
    # Queue, buffer, pattern, its size, offset, size, then the events.
    "clEnqueueFillBuffer": (
        c_int32,
        [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, c_size_t, *_EVENTS],
    ),
    # Queue, buffer, blocking, flags, offset, size, then the events and the status.
    "clEnqueueMapBuffer": (
        c_void_p,
        [c_void_p, c_void_p, c_uint32, c_uint64, c_size_t, c_size_t, *_EVENTS, POINTER(c_int32)],
    ),
    "clEnqueueUnmapMemObject": (c_int32, [c_void_p, c_void_p, c_void_p, *_EVENTS]),
    # Queue, blocking, flags, address, size, then the events.
    "clEnqueueSVMMap": (c_int32, [c_void_p, c_uint32, c_uint64, c_void_p, c_size_t, *_EVENTS]),
    "clEnqueueSVMUnmap": (c_int32, [c_void_p, c_void_p, *_EVENTS]),
    # Queue, blocking, to, from, size, then the events.
    "clEnqueueSVMMemcpy": (c_int32, [c_void_p, c_uint32, c_void_p, c_void_p, c_size_t, *_EVENTS]),
    # Queue, address, pattern, its size, size, then the events.
    "clEnqueueSVMMemFill": (c_int32, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t, *_EVENTS]),
}


@cache
def libopencl() -> ctypes.CDLL:
    """Return the loaded libOpenCL with argument types declared.

    A wheel of pyopencl bundles a loader of its own, and handles of one loader mean nothing to another:
    so the library is looked up where it is mapped, not by its usual name.

    Raises:
        MzdError: ``device_lost``, nothing of that name is mapped.
    """
    library = ctypes.CDLL(_mapped_library_path("libOpenCL"))
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = restype, argtypes
    return library


def _mapped_library_path(stem: str) -> str:
    """Return the path of the mapped library whose file name begins with `stem`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(stem):
            return path
    raise MzdError("device_lost", f"pyopencl has loaded no {stem}", library=stem)


def check(status: int, call: str) -> None:
    """Raise if `status`, returned by the OpenCL function `call`, is an error.

    Raises:
        MzdError: ``device_lost`` where the device or its queue is unusable from here on, else ``internal``;
            the message names the OpenCL error.
    """
    if status != 0:
        raise opencl_error(status, call)


def opencl_error(status: int, call: str) -> MzdError:
    """Return the error to raise for an OpenCL `status` from `call`."""
    to_string: Callable[[int, str], str] = cl.status_code.to_string  # type: ignore[assignment]  # a wrong stub
    name = to_string(status, "unknown error %d")
    code = "device_lost" if status in _LOST else _CODES.get(status, "internal")
    return MzdError(code, f"{call} failed: {name}", opencl_error=name, opencl_status=status)
