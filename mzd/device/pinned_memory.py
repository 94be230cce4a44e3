"""Owns host memory that the driver has pinned: the fast way in and out of a device with memory of its own."""

from __future__ import annotations

import ctypes

from mzd.device.libopencl import NO_EVENTS, check, libopencl
from mzd.errors import MzdError

_READ_WRITE = 1 << 0
_ALLOC_HOST_PTR = 1 << 4
_MAP_READ_WRITE = 1 << 0 | 1 << 1


class PinnedMemory:
    """A buffer of the kind that drivers pin, mapped for as long as it lives. `free` ends it.

    Attributes:
        address: of the first byte, for the host.
        size_bytes: usable bytes.

    Raises:
        MzdError: ``insufficient_memory``.
    """

    def __init__(self, context_handle: int, queue_handle: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._queue = queue_handle
        status = ctypes.c_int32()
        library = libopencl()
        self._handle: int | None = library.clCreateBuffer(
            context_handle, _READ_WRITE | _ALLOC_HOST_PTR, size_bytes, None, ctypes.byref(status)
        )
        address = self._handle and library.clEnqueueMapBuffer(
            queue_handle, self._handle, 1, _MAP_READ_WRITE, 0, size_bytes, *NO_EVENTS, ctypes.byref(status)
        )
        if not address:
            raise MzdError(
                "insufficient_memory", f"the driver pins no {size_bytes} bytes", requested_bytes=size_bytes
            )
        self.address = int(address)

    def free(self) -> None:
        """Give the memory back; no copy may be using it.

        Raises:
            RuntimeError: it was freed before.
        """
        if self._handle is None:
            raise RuntimeError("pinned memory freed twice")
        handle, self._handle = self._handle, None
        library = libopencl()
        unmapped = library.clEnqueueUnmapMemObject(self._queue, handle, self.address, *NO_EVENTS)
        check(unmapped, "clEnqueueUnmapMemObject")
        check(library.clFinish(self._queue), "clFinish")
        check(library.clReleaseMemObject(handle), "clReleaseMemObject")
