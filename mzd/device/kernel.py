"""Owns one kernel object with its arguments: they are set when they change, and launched as they stand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from mzd.device.launch_log import LaunchLog
from mzd.device.libopencl import EXEC_INFO_SVM_PTRS, check, libopencl
from mzd.device.places import BufferMap


class BoundKernel:
    """A kernel of one call site. Not thread-safe, as OpenCL's own kernel objects are not.

    Launches dominate the host's share of a decode step (4 to 10 us each), so nothing here allocates or
    converts on the way to the driver, and setting an argument to the value that it has costs one comparison.

    Args:
        svm_pointers: called before a launch for the list of SVM allocations that the kernel reaches through
            pointers in memory, (n,) uint64; None for a kernel that uses its arguments only. The list is
            given to the driver again only when it is another object.
        buffers: where the device's memory is buffers, which of them an address lies in; None for SVM. The
            kernel was then built to take offsets, see places.cl.
        launches: where launches leave their events while it records; None on a queue that keeps no times.
    """

    def __init__(
        self,
        kernel: cl.Kernel,
        queue_handle: int,
        svm_pointers: Callable[[], NDArray[np.uint64]] | None = None,
        *,
        buffers: BufferMap | None = None,
        launches: LaunchLog | None = None,
    ) -> None:
        self._kernel = kernel  # owns the handle
        self._handle: int = kernel.int_ptr
        self._queue_handle = queue_handle
        self._svm_pointers = svm_pointers
        self._known_pointers: NDArray[np.uint64] | None = None
        self._buffers = buffers
        self._launches = launches
        self._last_place = kernel.num_args - 1
        self._values: dict[int, tuple[object, object]] = {}
        library = libopencl()
        self._set_arg = library.clSetKernelArg
        self._set_svm_arg = library.clSetKernelArgSVMPointer
        self._enqueue = library.clEnqueueNDRangeKernel

    @property
    def name(self) -> str:
        """The function's name in the source."""
        return str(self._kernel.function_name)

    def set_address(self, index: int, address: int) -> None:
        """Set a pointer argument to an address of the device's memory. The caller keeps that alive.

        Raises:
            MzdError: ``internal``: the address is in no buffer.
        """
        if self._buffers is not None:
            self._set_place(index, address, self._buffers)
        elif self._is_new(index, ctypes.c_void_p, address):
            check(self._set_svm_arg(self._handle, index, address), "clSetKernelArgSVMPointer")

    def set_int(self, index: int, value: int) -> None:
        """Set an ``int`` argument."""
        self._set_scalar(index, ctypes.c_int32, value)

    def set_float(self, index: int, value: float) -> None:
        """Set a ``float`` argument."""
        self._set_scalar(index, ctypes.c_float, value)

    def set_local(self, index: int, size_bytes: int) -> None:
        """Set the size of a ``local`` pointer argument."""
        if self._is_new(index, type(None), size_bytes):
            check(self._set_arg(self._handle, index, size_bytes, None), "clSetKernelArg")

    def enqueue(self, global_size: tuple[int, ...], local_size: tuple[int, ...] | None = None) -> None:
        """Enqueue one launch; `local_size` None leaves the work-group to the driver.

        Raises:
            MzdError: the driver refused the launch.
        """
        if self._svm_pointers is not None:
            self._declare_pointers(self._svm_pointers())
        event = None if self._launches is None else self._launches.next_event()
        status = self._enqueue(
            self._queue_handle,
            self._handle,
            len(global_size),
            None,
            _size_array(global_size),
            None if local_size is None else _size_array(local_size),
            0,
            None,
            None if event is None else ctypes.byref(event),
        )
        check(status, "clEnqueueNDRangeKernel")

    def _set_place(self, index: int, address: int, buffers: BufferMap) -> None:
        """Set the buffer, and the offset among the arguments that PLACES adds in reverse at the end."""
        meaning = (buffers.generation, address)  # an address may come back with another buffer behind it
        if self._values.get(index) == meaning:
            return
        place = buffers.locate(address)
        for number, argument in (
            (index, ctypes.c_void_p(place.handle)),
            (self._last_place - index, ctypes.c_uint64(place.offset_bytes)),
        ):
            status = self._set_arg(self._handle, number, 8, ctypes.byref(argument))
            check(status, "clSetKernelArg")
        self._values[index] = meaning

    def _set_scalar(self, index: int, ctype: type[ctypes.c_int32 | ctypes.c_float], value: float) -> None:
        if self._is_new(index, ctype, value):
            argument = ctype(value)  # type: ignore[arg-type]  # c_int32 refuses a float by itself
            status = self._set_arg(self._handle, index, ctypes.sizeof(argument), ctypes.byref(argument))
            check(status, "clSetKernelArg")

    def _is_new(self, index: int, kind: object, value: object) -> bool:
        """Note the argument's value; return whether it differs from the last one."""
        if self._values.get(index) == (kind, value):
            return False
        self._values[index] = (kind, value)
        return True

    def _declare_pointers(self, pointers: NDArray[np.uint64]) -> None:
        if pointers is self._known_pointers:
            return
        status = libopencl().clSetKernelExecInfo(
            self._handle, EXEC_INFO_SVM_PTRS, pointers.nbytes, pointers.ctypes.data
        )
        check(status, "clSetKernelExecInfo")
        self._known_pointers = pointers


@lru_cache(maxsize=8192)
def _size_array(size: tuple[int, ...]) -> ctypes.Array[ctypes.c_size_t]:
    """Return `size` as a C array; sizes repeat from step to step, so the array is kept."""
    return (ctypes.c_size_t * len(size))(*size)
