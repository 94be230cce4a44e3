"""Owns where buffers lie: 64-bit addresses for all of Python, turned into buffer and offset for a kernel."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from dataclasses import dataclass

from mzd.errors import MzdError


@dataclass(frozen=True, slots=True)
class Place:
    """`offset_bytes` into the ``cl_mem`` of `handle`."""

    handle: int
    offset_bytes: int


class BufferMap:
    """All live buffers by address, the device's own or one that stands for it. Thread-safe.

    Attributes:
        generation: grows whenever a buffer goes: from then on its address may mean another buffer.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._lock = threading.Lock()
        self._addresses: list[int] = []
        self._buffers: dict[int, tuple[int, int]] = {}

    def add(self, address: int, size_bytes: int, handle: int) -> None:
        """Note a buffer; it may not overlap another."""
        with self._lock:
            insort(self._addresses, address)
            self._buffers[address] = (size_bytes, handle)

    def remove(self, address: int) -> int:
        """Forget the buffer that begins at `address`; return its handle.

        Raises:
            RuntimeError: there is none.
        """
        with self._lock:
            index = bisect_right(self._addresses, address) - 1
            if index < 0 or self._addresses[index] != address:
                raise RuntimeError(f"no buffer begins at {address:#x}")
            del self._addresses[index]
            self.generation += 1
            return self._buffers.pop(address)[1]

    def find(self, address: int) -> Place | None:
        """Return the place of `address`, or None where no buffer is."""
        with self._lock:
            index = bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            start = self._addresses[index]
            size_bytes, handle = self._buffers[start]
        return Place(handle, address - start) if address < start + size_bytes else None

    def locate(self, address: int) -> Place:
        """Return the place of `address`.

        Raises:
            MzdError: ``internal``: no buffer is there.
        """
        place = self.find(address)
        if place is None:
            raise MzdError("internal", f"no buffer of the device holds the address {address:#x}")
        return place
