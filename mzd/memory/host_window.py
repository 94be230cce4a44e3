"""Owns the pinned memory that bytes pass through on their way to a device with memory of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mzd.memory.range_set import RangeSet
from mzd.policy.units import PAGE_BYTES


class HostWindow:
    """One stretch of memory, handed out in pieces to the threads that fill or read them.

    Args:
        address: of the memory, page-aligned.
        size_bytes: of it; no request may be larger.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._free = RangeSet()
        self._free.add(address, address + size_bytes)
        self._changed = threading.Condition()

    @contextmanager
    def slots(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Wait for room for all of `sizes` bytes side by side; their addresses, page-aligned.

        Raises:
            ValueError: they do not fit into the window.
        """
        rounded = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes]
        start = self._take(sum(rounded))
        try:
            yield [start + sum(rounded[:i]) for i in range(len(rounded))]
        finally:
            with self._changed:
                self._free.add(start, start + sum(rounded))
                self._changed.notify_all()

    def _take(self, size_bytes: int) -> int:
        if size_bytes > self.size_bytes:
            raise ValueError(f"{size_bytes} bytes do not pass through a window of {self.size_bytes}")
        with self._changed:
            while True:
                fit = self._free.best_fit(size_bytes)
                if fit is not None:
                    self._free.discard(fit[0], fit[0] + size_bytes)
                    return fit[0]
                self._changed.wait()
