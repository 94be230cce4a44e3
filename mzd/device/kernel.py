"""Owns one kernel object with its arguments: they are set when they change, and launched as they stand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mzd.device.kernel_object import KernelObject
from mzd.device.launch_queue import LaunchQueue
from mzd.device.libopencl import EXEC_INFO_SVM_PTRS, check, libopencl
from mzd.device.places import BufferMap


class BoundKernel:
    """A kernel of one call site. Not thread-safe, as OpenCL's own kernel objects are not.

    Nothing here allocates or converts on the way to the driver, and setting an argument to the value that it
    has costs one comparison.

    Args:
        queue: where it is enqueued. If that has buffers, the kernel was built to take offsets, see places.cl.
        svm_pointers: called before a launch for the list of SVM allocations that the kernel reaches through
            pointers in memory, (n,) uint64; None for a kernel that uses its arguments only. The list is
            given to the driver again only when it is another object.

    Attributes:
        handle: the driver's.
        changes: how many arguments it has got; never falls. While it stays, launches do the same.
    """

    def __init__(
        self,
        kernel: KernelObject,
        queue: LaunchQueue,
        svm_pointers: Callable[[], NDArray[np.uint64]] | None = None,
    ) -> None:
        self._kernel = kernel  # owns the handle
        self.handle = kernel.handle
        self.changes = 0
        self._queue = queue
        self._svm_pointers = svm_pointers
        self._known_pointers: NDArray[np.uint64] | None = None
        self._last_place = kernel.num_args - 1
        self._values: dict[int, tuple[object, object]] = {}
        library = libopencl()
        self._set_arg = library.clSetKernelArg
        self._set_svm_arg = library.clSetKernelArgSVMPointer

    @property
    def name(self) -> str:
        """The function's name in the source."""
        return self._kernel.name

    @property
    def follows_pointers(self) -> bool:
        """Whether it reaches allocations that are not among its arguments."""
        return self._svm_pointers is not None

    def set_address(self, index: int, address: int) -> None:
        """Set a pointer argument to an address of the device's memory. The caller keeps that alive.

        Raises:
            MzdError: ``internal``: the address is in no buffer.
        """
        if self._queue.buffers is not None:
            self._set_place(index, address, self._queue.buffers)
        elif self._values.get(index) != (meaning := (ctypes.c_void_p, address)):
            check(self._set_svm_arg(self.handle, index, address), "clSetKernelArgSVMPointer")
            self._note(index, meaning)

    def set_int(self, index: int, value: int) -> None:
        """Set an ``int`` argument."""
        self._set_scalar(index, ctypes.c_int32, value)

    def set_float(self, index: int, value: float) -> None:
        """Set a ``float`` argument."""
        self._set_scalar(index, ctypes.c_float, value)

    def set_local(self, index: int, size_bytes: int) -> None:
        """Set the size of a ``local`` pointer argument."""
        if self._values.get(index) != (meaning := (None, size_bytes)):
            check(self._set_arg(self.handle, index, size_bytes, None), "clSetKernelArg")
            self._note(index, meaning)

    def enqueue(self, global_size: tuple[int, ...], local_size: tuple[int, ...] | None = None) -> None:
        """Enqueue one launch; `local_size` None leaves the work-group to the driver.

        Raises:
            MzdError: the driver refused the launch.
        """
        if self._svm_pointers is not None:
            self.declare_pointers()
        self._queue.enqueue(self, global_size, local_size)

    def declare_pointers(self) -> None:
        """Tell the driver of the allocations that the kernel reaches through memory, if they have changed.

        Raises:
            MzdError: the driver refused them.
        """
        if self._svm_pointers is None or (pointers := self._svm_pointers()) is self._known_pointers:
            return
        status = libopencl().clSetKernelExecInfo(
            self.handle, EXEC_INFO_SVM_PTRS, pointers.nbytes, pointers.ctypes.data
        )
        check(status, "clSetKernelExecInfo")
        self._known_pointers = pointers

    def _set_place(self, index: int, address: int, buffers: BufferMap) -> None:
        """Set the buffer, and the offset among the arguments that PLACES adds in reverse at the end."""
        meaning = (buffers.generation, address)  # an address may come back with another buffer behind it
        if self._values.get(index) == meaning:
            return
        place = buffers.locate(address)
        self._values.pop(index, None)  # one of the two may be refused
        for number, argument in (
            (index, ctypes.c_void_p(place.handle)),
            (self._last_place - index, ctypes.c_uint64(place.offset_bytes)),
        ):
            status = self._set_arg(self.handle, number, 8, ctypes.byref(argument))
            check(status, "clSetKernelArg")
        self._note(index, meaning)

    def _set_scalar(self, index: int, ctype: type[ctypes.c_int32 | ctypes.c_float], value: float) -> None:
        if self._values.get(index) != (meaning := (ctype, value)):
            argument = ctype(value)  # type: ignore[arg-type]  # c_int32 refuses a float by itself
            status = self._set_arg(self.handle, index, ctypes.sizeof(argument), ctypes.byref(argument))
            check(status, "clSetKernelArg")
            self._note(index, meaning)

    def _note(self, index: int, meaning: tuple[object, object]) -> None:
        """Remember what the driver has taken as an argument."""
        self._values[index] = meaning
        self.changes += 1
