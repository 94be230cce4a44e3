"""Owns shared virtual memory: allocations that the host and the device see at one address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mzd.device.libopencl import libopencl
from mzd.errors import MzdError

_MEM_READ_WRITE = 1 << 0
_MEM_SVM_FINE_GRAIN_BUFFER = 1 << 10

SVM_ALIGNMENT_BYTES = 128
"""The largest alignment that every driver grants: PoCL and NEO return NULL above it."""


class SvmReservation:
    """One fine-grain SVM allocation, freed by `free()` and by nothing else.

    It is a reservation because a driver that works on host memory (PoCL) maps it without touching a page:
    what is resident inside it is the owner's affair (`madvise`).

    Attributes:
        address: of the first byte, the same for host and device; a multiple of 128.
        size_bytes: usable bytes.
    """

    def __init__(
        self, context_handle: int, size_bytes: int, on_free: Callable[[SvmReservation], None]
    ) -> None:
        flags = _MEM_READ_WRITE | _MEM_SVM_FINE_GRAIN_BUFFER
        address = libopencl().clSVMAlloc(context_handle, flags, size_bytes, SVM_ALIGNMENT_BYTES)
        if not address:
            raise MzdError(
                "insufficient_memory",
                f"the device has no room for {size_bytes} bytes of shared memory",
                requested_bytes=size_bytes,
            )
        self.address: int = address
        self.size_bytes = size_bytes
        self._context_handle = context_handle
        self._on_free = on_free
        self._freed = False

    def free(self) -> None:
        """Give the memory back; no kernel that uses it may be running. A second call is an error.

        Raises:
            RuntimeError: it was freed before.
        """
        if self._freed:
            raise RuntimeError(f"SVM reservation at {self.address:#x} freed twice")
        self._freed = True
        self._on_free(self)
        libopencl().clSVMFree(self._context_handle, self.address)


class ScratchBuffer:
    """A zeroed SVM allocation for activations, tables and results, with NumPy views into it."""

    def __init__(self, reservation: SvmReservation) -> None:
        self._reservation = reservation
        ctypes.memset(reservation.address, 0, reservation.size_bytes)

    @property
    def address(self) -> int:
        """Address of the first byte, for kernels."""
        return self._reservation.address

    @property
    def size_bytes(self) -> int:
        """Bytes allocated."""
        return self._reservation.size_bytes

    def view(self, dtype: DTypeLike, shape: tuple[int, ...], *, offset_bytes: int = 0) -> NDArray[Any]:
        """Return a writable C-contiguous view of `shape` that begins `offset_bytes` into the buffer.

        The view does not keep the memory alive: it ends with `free()`.

        Raises:
            ValueError: the view would end past the buffer.
        """
        size_bytes = np.dtype(dtype).itemsize * int(np.prod(shape))
        if offset_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset_bytes} do not fit into {self.size_bytes}")
        memory = memoryview((ctypes.c_ubyte * size_bytes).from_address(self.address + offset_bytes))
        return np.ndarray(shape, dtype, buffer=memory)

    def free(self) -> None:
        """Give the memory back; see `SvmReservation.free`."""
        self._reservation.free()
