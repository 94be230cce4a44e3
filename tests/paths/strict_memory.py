"""Owns shared memory that forgives nothing: what the host writes reaches the device through maps alone.

PoCL's memory is the host's, so a map that somebody forgot goes unnoticed there; on a GPU the write vanishes
(a Mali G52 lost six plain stores of six). Here it vanishes too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

POISON = 0xFF  # a NaN, as float16 and as float32


class StrictAllocator:
    """`UnitAllocator` over another one whose addresses the host can reach.

    A map gives memory of its own, poisoned for a writer. Before a kernel first sees a unit, its content is
    what `unmap` took over, and zeros besides: `hand_over` makes it so.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._sizes: dict[int, int] = {}
        self._contents: dict[int, np.ndarray] = {}  # of units that no kernel has seen
        self._maps: dict[int, tuple[Any, int, int, bool]] = {}

    def allocate(self, size_bytes: int) -> int:
        address = self._allocator.allocate(size_bytes)
        self._sizes[address] = size_bytes
        self._contents[address] = np.zeros(size_bytes, np.uint8)
        return int(address)

    def free(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            self._contents.pop(address, None)
            ctypes.memset(address, POISON, self._sizes.pop(address))
        self._allocator.free(addresses)

    def map(self, address: int, size_bytes: int, *, write: bool) -> int:
        shadow = ctypes.create_string_buffer(size_bytes + 4096)
        host_address = -(-ctypes.addressof(shadow) // 4096) * 4096
        if write:
            ctypes.memset(host_address, POISON, size_bytes)
        else:
            ctypes.memmove(host_address, address, size_bytes)
        self._maps[host_address] = (shadow, address, size_bytes, write)
        return host_address

    def unmap(self, address: int, host_address: int) -> None:
        shadow, address, size_bytes, write = self._maps.pop(host_address)
        if write:
            start = max(unit for unit in self._sizes if unit <= address)
            written = (ctypes.c_ubyte * size_bytes).from_address(host_address)
            self._contents[start][address - start : address - start + size_bytes] = written
        ctypes.memset(shadow, POISON, len(shadow))

    def hand_over(self, addresses: Sequence[int]) -> None:
        """A kernel is about to use these units: it sees what maps have written, and no more."""
        for address in addresses:
            content = self._contents.pop(int(address), None)
            if content is not None:
                ctypes.memmove(int(address), content.ctypes.data, content.nbytes)
