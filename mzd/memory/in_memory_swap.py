"""Owns the in-memory swap: compressed chunks as a stack of segments that shrinks as it is popped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from mzd import native
from mzd.errors import MzdError
from mzd.memory.huge_pages import forbid_huge_pages
from mzd.policy.units import HUGE_PAGE_BYTES

SEGMENT_BYTES = 1024 * 1024
HUGE_SEGMENT_BYTES = 8 * HUGE_PAGE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Memory of one payload, told apart by identity.

    Attributes:
        address: of the first byte; a multiple of 4096, so that direct I/O can take it.
        size_bytes: of the payload. The memory goes on to the end of its page.
    """

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Attributes:
    num_payloads: slots that are not released.
    payload_bytes: sum of their sizes.
    resident_bytes: the same in whole pages: what the swap costs.
    reserved_bytes: address space of all segments.
    """

    num_payloads: int
    payload_bytes: int
    resident_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class DetachedPages:
    """Memory that the swap has let go of: ranges of segments that live on, and whole segments."""

    ranges: tuple[tuple[int, int], ...]
    segments: tuple[mmap.mmap, ...]


def free_pages(detached: DetachedPages) -> None:
    """Give detached pages back to the system; may run in any thread.

    Raises:
        OSError: the kernel refused.
    """
    for address, size_bytes in detached.ranges:
        code = native.release(address, size_bytes)
        if code:
            raise OSError(-code, f"cannot release pages: {os.strerror(-code)}")
    for segment in detached.segments:
        segment.close()


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // native.PAGE_BYTES) * native.PAGE_BYTES


@dataclass(slots=True, eq=False)
class _Segment:
    """One mapping, filled from its start; `slots` are the live ones, in push order."""

    memory: mmap.mmap
    address: int
    size_bytes: int
    slots: list[Slot] = field(default_factory=list)

    @property
    def top(self) -> int:
        """Address behind the highest slot: what is below and free stays unused, and costs nothing."""
        return self.slots[-1].address + _pages(self.slots[-1].size_bytes) if self.slots else self.address

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.size_bytes

    @property
    def room_bytes(self) -> int:
        return self.address + self.size_bytes - self.top


class InMemorySwap:
    """A stack of payload slots. Only its owner calls it; whoever encodes or decodes works on the addresses.

    `push` touches nothing: a segment is address space, and becomes resident page by page as payloads are
    written. A slot begins on a page of its own, which wastes half a page on average (2 % of a small
    payload) and buys that a released slot's memory is gone at once, in whatever order slots go, and that
    CompKV can write slots to flash directly.

    Fresh small pages cost an eviction more than encoding does. So an eviction that has freed at least a huge
    page asks for segments of those: their first payload makes 2 MiB resident, never more than went before.

    Args:
        segment_bytes: address space to take at a time; a longer payload gets a segment of its own.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._segment_bytes = _pages(segment_bytes)
        self._segments: list[_Segment] = []
        self._live: dict[Slot, _Segment] = {}
        self._payload_bytes = 0
        self._resident_bytes = 0

    def push(self, size_bytes: int, *, huge: bool = False) -> Slot:
        """Get a slot on top of the stack for a payload of `size_bytes`.

        Args:
            huge: should a new segment be needed, it may be one of huge pages.

        Raises:
            MzdError: `insufficient_memory`; the system maps no further segment.
            ValueError: `size_bytes` is not positive.
        """
        if size_bytes <= 0:
            raise ValueError("a payload has at least one byte")
        segment = self._segments[-1] if self._segments else None
        if segment is None or segment.room_bytes < size_bytes:
            length = HUGE_SEGMENT_BYTES if huge else self._segment_bytes
            segment = _map_segment(max(length, _pages(size_bytes)), huge=huge)
            self._segments.append(segment)
        slot = Slot(segment.top, size_bytes)
        segment.slots.append(slot)
        self._live[slot] = segment
        self._count(slot, +1)
        return slot

    def release(self, slot: Slot) -> None:
        """Drop a payload: its pages leave the resident set now. The top slot is the usual one to go.

        Raises:
            RuntimeError: the slot was released before, or is another swap's.
        """
        free_pages(self.detach([slot]))

    def detach(self, slots: Iterable[Slot]) -> DetachedPages:
        """Take payloads off the books without giving their pages back: `free_pages` does that, in a thread.

        Unmapping waits for whoever faults pages in meanwhile, and the owner's loop must not wait with it.

        Raises:
            RuntimeError: a slot was released before, or is another swap's.
        """
        ranges: list[tuple[int, int]] = []
        emptied: list[mmap.mmap] = []
        for slot in slots:
            segment = self._live.pop(slot, None)
            if segment is None:
                raise RuntimeError(f"the slot at {slot.address:#x} is not in use")
            self._count(slot, -1)
            while segment.slots and segment.slots[-1] not in self._live:
                segment.slots.pop()
            if segment.slots:
                ranges.append((slot.address, _pages(slot.size_bytes)))
            else:
                self._segments.remove(segment)
                emptied.append(segment.memory)
                ranges = [found for found in ranges if not segment.holds(found[0])]
        return DetachedPages(tuple(ranges), tuple(emptied))

    def _count(self, slot: Slot, sign: int) -> None:
        self._payload_bytes += sign * slot.size_bytes
        self._resident_bytes += sign * _pages(slot.size_bytes)

    def statistics(self) -> SwapStatistics:
        """Count what is held now. A slot counts from `push` on, though its pages come with the payload."""
        return SwapStatistics(
            num_payloads=len(self._live),
            payload_bytes=self._payload_bytes,
            resident_bytes=self._resident_bytes,
            reserved_bytes=sum(segment.size_bytes for segment in self._segments),
        )


def _map_segment(size_bytes: int, *, huge: bool) -> _Segment:
    try:
        slack_bytes = HUGE_PAGE_BYTES if huge else 0  # address space only, for the alignment
        memory = mmap.mmap(-1, size_bytes + slack_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MzdError(
            "insufficient_memory",
            f"the system maps no {size_bytes} bytes for compressed chunks: {error.strerror}",
            requested_bytes=size_bytes,
        ) from error
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if not huge:
        forbid_huge_pages(start, size_bytes)  # or the first payload could make 2 MiB resident
        return _Segment(memory, start, size_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _Segment(memory, -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, size_bytes)
