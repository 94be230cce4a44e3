"""Owns allocations of the device's memory one by one: SVM or buffers, and how bytes get in and out of them.

A unit is one allocation wherever its pages are not our own to give back (see `mzd.memory.device_units`). All
methods block and may be called from any thread; the driver is called without the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from mzd.device.libopencl import NO_EVENTS, check, libopencl, opencl_error
from mzd.device.places import BufferMap
from mzd.device.svm import SVM_ALIGNMENT_BYTES
from mzd.errors import MzdError
from mzd.policy.units import PAGE_BYTES

_READ_WRITE = 1 << 0
_ALLOC_HOST_PTR = 1 << 4
_SVM_FINE_GRAIN = 1 << 10
_MAP_READ = 1 << 0
_MAP_WRITE_INVALIDATE = 1 << 2
"""Flags of cl.h. Invalidating: what the host does not write is lost, so nothing is copied to the host."""

_FIRST_STAND_IN = 1 << 44
_STAND_IN_GAP = 1 << 16
"""Addresses that stand for buffers whose own is not known: not low, where programs lie, and apart."""


class Allocations(Protocol):
    """What each kind of memory can do. Addresses may point into an allocation, unless said otherwise."""

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new zeroed memory, a multiple of 128.

        Raises:
            MzdError: ``insufficient_memory``.
        """
        ...

    def free(self, addresses: Sequence[int]) -> None:
        """Give whole allocations back; nothing on the device may use them. May wait for running kernels."""
        ...

    def map(self, address: int, size_bytes: int, *, write: bool) -> int:
        """Let the host write the range, whose old content is lost, or read it; return the host's address."""
        ...

    def unmap(self, address: int, host_address: int) -> None:
        """End what `map` returned: from here on the device sees what the host wrote."""
        ...

    def copy_in(
        self, address: int, host_address: int, size_bytes: int, *, queue: int | None = None, wait: bool = True
    ) -> None:
        """Copy from the host's memory, on `queue` if given; with `wait` the device has it on return."""
        ...

    def copy_out(
        self, address: int, host_address: int, size_bytes: int, *, queue: int | None = None, wait: bool = True
    ) -> None:
        """Copy to the host's memory, on `queue` if given; with `wait` it is there on return."""
        ...


class SvmAllocations:
    """Shared virtual memory: host and device use one address.

    Args:
        queue_handle: of the queue for maps and copies, not the kernels' own.
        fine: fine-grain, which needs no map.
        changed: called with all addresses after each change.
    """

    def __init__(
        self,
        context_handle: int,
        queue_handle: int,
        *,
        fine: bool,
        changed: Callable[[Sequence[int]], None],
    ) -> None:
        self._context_handle = context_handle
        self._queue = queue_handle
        self._fine = fine
        self._changed = changed
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int:
        """See `Allocations.allocate`."""
        flags = _READ_WRITE | (_SVM_FINE_GRAIN if self._fine else 0)
        library = libopencl()
        address = library.clSVMAlloc(self._context_handle, flags, size_bytes, PAGE_BYTES)
        # Page-aligned, for direct I/O, where the driver grants that.
        address = address or library.clSVMAlloc(self._context_handle, flags, size_bytes, SVM_ALIGNMENT_BYTES)
        if not address:
            raise _no_room(size_bytes)
        status = library.clEnqueueSVMMemFill(
            self._queue, address, bytes(4), 4, size_bytes // 4 * 4, *NO_EVENTS
        )
        status = status or library.clFinish(self._queue)
        if status:
            library.clSVMFree(self._context_handle, address)
            raise opencl_error(status, "clEnqueueSVMMemFill")
        with self._lock:
            self._live[address] = size_bytes
            self._changed(list(self._live))
        return int(address)

    def free(self, addresses: Sequence[int]) -> None:
        """See `Allocations.free`."""
        with self._lock:
            for address in addresses:
                del self._live[address]
            self._changed(list(self._live))
        for address in addresses:
            libopencl().clSVMFree(self._context_handle, address)

    def map(self, address: int, size_bytes: int, *, write: bool) -> int:
        """See `Allocations.map`."""
        if not self._fine:
            flags = _MAP_WRITE_INVALIDATE if write else _MAP_READ
            status = libopencl().clEnqueueSVMMap(self._queue, 1, flags, address, size_bytes, *NO_EVENTS)
            check(status, "clEnqueueSVMMap")
        return address

    def unmap(self, address: int, host_address: int) -> None:
        """See `Allocations.unmap`."""
        if not self._fine:
            check(libopencl().clEnqueueSVMUnmap(self._queue, host_address, *NO_EVENTS), "clEnqueueSVMUnmap")
            check(libopencl().clFinish(self._queue), "clFinish")

    def copy_in(
        self, address: int, host_address: int, size_bytes: int, *, queue: int | None = None, wait: bool = True
    ) -> None:
        """See `Allocations.copy_in`."""
        self._copy(address, host_address, size_bytes, queue, wait)

    def copy_out(
        self, address: int, host_address: int, size_bytes: int, *, queue: int | None = None, wait: bool = True
    ) -> None:
        """See `Allocations.copy_out`."""
        self._copy(host_address, address, size_bytes, queue, wait)

    def _copy(
        self, to_address: int, from_address: int, size_bytes: int, queue: int | None, wait: bool
    ) -> None:
        status = libopencl().clEnqueueSVMMemcpy(
            queue or self._queue, wait, to_address, from_address, size_bytes, *NO_EVENTS
        )
        check(status, "clEnqueueSVMMemcpy")


class BufferAllocations:
    """``cl_mem`` objects. Their addresses are the device's own if `address_of` finds them, else stand-ins.

    Args:
        queue_handle: of the queue for maps and copies, not the kernels' own.
        buffers: where they are noted, for kernels' arguments.
        address_of: asks the device for a buffer's address, by its handle; None: stand-ins, which kernels
            cannot follow.
    """

    def __init__(
        self,
        context_handle: int,
        queue_handle: int,
        buffers: BufferMap,
        address_of: Callable[[int], int] | None,
    ) -> None:
        self._context_handle = context_handle
        self._queue = queue_handle
        self._buffers = buffers
        self._address_of = address_of
        self._flags = _READ_WRITE | (0 if address_of else _ALLOC_HOST_PTR)
        self._lock = threading.Lock()
        self._next_stand_in = _FIRST_STAND_IN

    def allocate(self, size_bytes: int) -> int:
        """See `Allocations.allocate`. Filling also makes the driver take the memory now, or refuse."""
        status = ctypes.c_int32()
        library = libopencl()
        handle = library.clCreateBuffer(
            self._context_handle, self._flags, size_bytes, None, ctypes.byref(status)
        )
        if not handle:
            raise _no_room(size_bytes)
        try:
            check(
                library.clEnqueueFillBuffer(
                    self._queue, handle, bytes(4), 4, 0, size_bytes // 4 * 4, *NO_EVENTS
                ),
                "clEnqueueFillBuffer",
            )
            check(library.clFinish(self._queue), "clFinish")
            address = self._address_of(handle) if self._address_of else self._stand_in(size_bytes)
        except MzdError:
            library.clReleaseMemObject(handle)
            raise
        self._buffers.add(address, size_bytes, handle)
        return address

    def free(self, addresses: Sequence[int]) -> None:
        """See `Allocations.free`."""
        for address in addresses:
            handle = self._buffers.remove(address)
            check(libopencl().clReleaseMemObject(handle), "clReleaseMemObject")

    def map(self, address: int, size_bytes: int, *, write: bool) -> int:
        """See `Allocations.map`."""
        place = self._buffers.locate(address)
        flags = _MAP_WRITE_INVALIDATE if write else _MAP_READ
        status = ctypes.c_int32()
        host_address = libopencl().clEnqueueMapBuffer(
            self._queue,
            place.handle,
            1,
            flags,
            place.offset_bytes,
            size_bytes,
            *NO_EVENTS,
            ctypes.byref(status),
        )
        check(status.value, "clEnqueueMapBuffer")
        return int(host_address)

    def unmap(self, address: int, host_address: int) -> None:
        """See `Allocations.unmap`."""
        handle = self._buffers.locate(address).handle
        check(
            libopencl().clEnqueueUnmapMemObject(self._queue, handle, host_address, *NO_EVENTS),
            "clEnqueueUnmapMemObject",
        )
        check(libopencl().clFinish(self._queue), "clFinish")

    def copy_in(
        self, address: int, host_address: int, size_bytes: int, *, queue: int | None = None, wait: bool = True
    ) -> None:
        """See `Allocations.copy_in`."""
        self._copy("clEnqueueWriteBuffer", address, host_address, size_bytes, queue, wait)

    def copy_out(
        self, address: int, host_address: int, size_bytes: int, *, queue: int | None = None, wait: bool = True
    ) -> None:
        """See `Allocations.copy_out`."""
        self._copy("clEnqueueReadBuffer", address, host_address, size_bytes, queue, wait)

    def _copy(
        self, call: str, address: int, host_address: int, size_bytes: int, queue: int | None, wait: bool
    ) -> None:
        place = self._buffers.locate(address)
        status = getattr(libopencl(), call)(
            queue or self._queue,
            place.handle,
            wait,
            place.offset_bytes,
            size_bytes,
            host_address,
            *NO_EVENTS,
        )
        check(status, call)

    def _stand_in(self, size_bytes: int) -> int:
        with self._lock:
            address = self._next_stand_in
            self._next_stand_in += -(-size_bytes // _STAND_IN_GAP) * _STAND_IN_GAP + _STAND_IN_GAP
        return address


def _no_room(size_bytes: int) -> MzdError:
    return MzdError(
        "insufficient_memory",
        f"the device has no room for {size_bytes} bytes",
        requested_bytes=size_bytes,
    )
