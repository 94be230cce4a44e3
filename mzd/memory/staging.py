"""Owns the bounded memory that payloads pass through between flash and the decompressor."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from dataclasses import dataclass

import trio

from mzd.errors import MzdError
from mzd.policy.units import HUGE_PAGE_BYTES, PAGE_BYTES


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """One slot of the pool, page-aligned; whoever holds it gives it back with `release`."""

    address: int
    size_bytes: int
    _pool: StagingPool
    _borrower: object

    def release(self) -> None:
        """Give the slot back. Twice is a broken invariant and raises RuntimeError."""
        self._pool.give_back(self)


class StagingPool:
    """A few page-aligned slots, mapped while a restore needs them and unmapped after it.

    Args:
        slot_bytes: size of a slot, a multiple of the page size.
        num_slots: slots that exist at the most; `acquire` waits for one.
    """

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        if slot_bytes % PAGE_BYTES:
            raise ValueError("a staging slot must be whole pages")
        self.slot_bytes = slot_bytes
        self._limit = trio.CapacityLimiter(num_slots)
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[int] = []
        self._held: set[int] = set()

    @property
    def size_bytes(self) -> int:
        """Bytes mapped now; all of them count as resident."""
        return len(self._maps) * self.slot_bytes

    async def acquire(self) -> StagingBuffer:
        """Wait for a slot. Cancelled: none is held.

        Raises:
            MzdError: `insufficient_memory`; the system maps no further slot, none is held.
        """
        borrower = object()
        await self._limit.acquire_on_behalf_of(borrower)
        try:
            address = self._free.pop() if self._free else self._map_slot()
        except MzdError:
            self._limit.release_on_behalf_of(borrower)
            raise
        self._held.add(address)
        return StagingBuffer(address, self.slot_bytes, self, borrower)

    def _map_slot(self) -> int:
        """A slot begins on a huge page: direct reads into untouched small pages run at half the speed."""
        size_bytes = self.slot_bytes + HUGE_PAGE_BYTES
        try:
            slot = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MzdError(
                "insufficient_memory",
                f"the system maps no {self.slot_bytes} bytes to read payloads into: {error.strerror}",
                requested_bytes=self.slot_bytes,
            ) from error
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
            slot.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(slot))
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._maps[address] = slot
        return address

    def give_back(self, buffer: StagingBuffer) -> None:
        """See `StagingBuffer.release`."""
        if buffer.address not in self._held:
            raise RuntimeError("a staging buffer was released twice")
        self._held.discard(buffer.address)
        self._free.append(buffer.address)
        self._limit.release_on_behalf_of(buffer._borrower)

    def trim(self) -> None:
        """Unmap every free slot: called when a restore ends, since idle memory belongs to others."""
        for address in self._free:
            self._maps.pop(address).close()
        self._free.clear()
