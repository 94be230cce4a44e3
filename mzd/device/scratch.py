"""Owns a step's own memory, and how the host sees it: directly, or in a mirror that is copied over."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mzd.device.allocations import Allocations
from mzd.device.svm import SvmReservation


class ScratchBuffer(Protocol):
    """Zeroed memory for activations, tables and results, with NumPy views for the host.

    Between writing to a view and the kernel that reads it stands `upload`; between a kernel and reading
    its result in a view stand `download` and waiting for the queue. Both are enqueued where the kernels are,
    and do nothing where host and device share the memory.
    """

    @property
    def address(self) -> int:
        """Address of the first byte, for kernels."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes allocated."""
        ...

    def view(self, dtype: DTypeLike, shape: tuple[int, ...], *, offset_bytes: int = 0) -> NDArray[Any]:
        """Return a writable C-contiguous view of `shape` that begins `offset_bytes` into the buffer.

        The view does not keep the memory alive: it ends with `free()`.

        Raises:
            ValueError: the view would end past the buffer.
        """
        ...

    def upload(self, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """Give the device what the host wrote in this range (by default up to the end)."""
        ...

    def download(self, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """Give the host what the device wrote in this range."""
        ...

    def free(self) -> None:
        """Give the memory back; no kernel that uses it may be running. A second call is an error."""
        ...


class SharedScratch:
    """A `ScratchBuffer` in fine-grain shared memory: the host's views are the device's memory."""

    def __init__(self, reservation: SvmReservation) -> None:
        self._reservation = reservation
        ctypes.memset(reservation.address, 0, reservation.size_bytes)

    @property
    def address(self) -> int:
        """See `ScratchBuffer.address`."""
        return self._reservation.address

    @property
    def size_bytes(self) -> int:
        """See `ScratchBuffer.size_bytes`."""
        return self._reservation.size_bytes

    def view(self, dtype: DTypeLike, shape: tuple[int, ...], *, offset_bytes: int = 0) -> NDArray[Any]:
        """See `ScratchBuffer.view`."""
        return _view(self.address, self.size_bytes, dtype, shape, offset_bytes)

    def upload(self, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """Nothing to do."""

    def download(self, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """Nothing to do."""

    def free(self) -> None:
        """See `ScratchBuffer.free`."""
        self._reservation.free()


class MirroredScratch:
    """A `ScratchBuffer` in memory that the host cannot see, or only when mapped: its views are a mirror.

    A mirror costs no memory where the host never looks, for its pages are touched by the copies only.

    Args:
        allocations: of the device's memory.
        queue_handle: of the kernels' queue.
    """

    def __init__(self, allocations: Allocations, queue_handle: int, size_bytes: int) -> None:
        self._allocations = allocations
        self._queue_handle = queue_handle
        self._freed = False
        self.address = allocations.allocate(size_bytes)
        self.size_bytes = size_bytes
        self._mirror = mmap.mmap(-1, size_bytes)
        self._host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._mirror))

    def view(self, dtype: DTypeLike, shape: tuple[int, ...], *, offset_bytes: int = 0) -> NDArray[Any]:
        """See `ScratchBuffer.view`."""
        return _view(self._host_address, self.size_bytes, dtype, shape, offset_bytes)

    def upload(self, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """See `ScratchBuffer.upload`. The views may not change until a later kernel has ended."""
        place = self._range(offset_bytes, size_bytes)
        self._allocations.copy_in(*place, queue=self._queue_handle, wait=False)

    def download(self, offset_bytes: int = 0, size_bytes: int | None = None) -> None:
        """See `ScratchBuffer.download`."""
        place = self._range(offset_bytes, size_bytes)
        self._allocations.copy_out(*place, queue=self._queue_handle, wait=False)

    def free(self) -> None:
        """See `ScratchBuffer.free`."""
        if self._freed:
            raise RuntimeError(f"scratch memory at {self.address:#x} freed twice")
        self._freed = True
        self._allocations.free([self.address])

    def _range(self, offset_bytes: int, size_bytes: int | None) -> tuple[int, int, int]:
        size_bytes = self.size_bytes - offset_bytes if size_bytes is None else size_bytes
        return self.address + offset_bytes, self._host_address + offset_bytes, size_bytes


def _view(
    address: int, total_bytes: int, dtype: DTypeLike, shape: tuple[int, ...], offset_bytes: int
) -> NDArray[Any]:
    size_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
    if offset_bytes < 0 or offset_bytes + size_bytes > total_bytes:
        raise ValueError(f"{size_bytes} bytes at {offset_bytes} do not fit into {total_bytes}")
    memory = memoryview((ctypes.c_ubyte * size_bytes).from_address(address + offset_bytes))
    return np.ndarray(shape, dtype, buffer=memory)
