"""Owns shared virtual memory: allocations that the host and the device see at one address."""

from __future__ import annotations

from collections.abc import Callable

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
