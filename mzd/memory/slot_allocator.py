"""Owns the places of chunks in one swap file: pure bookkeeping, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from mzd.memory.range_set import RangeSet

REGION_CHUNKS = 16
"""Consecutive chunks of a layer that lie side by side. Reads saturate at about 512 KiB (paper, 4.3): sixteen
chunks are that even for the smallest models, whose compressed chunks take some 50 KiB."""


@dataclass(frozen=True, slots=True)
class SwapSlot:
    """The place of one chunk: ``[offset_bytes, offset_bytes + slot_bytes)`` of the file."""

    layer: int
    chunk: int
    offset_bytes: int
    slot_bytes: int

    @property
    def region_start(self) -> int:
        """Offset of the region that the slot is in."""
        return self.offset_bytes - self.chunk % REGION_CHUNKS * self.slot_bytes

    @property
    def region_bytes(self) -> int:
        """Size of the region that the slot is in."""
        return REGION_CHUNKS * self.slot_bytes


_RegionKey = tuple[int, int, int]


def _region_key(layer: int, chunk: int, slot_bytes: int) -> _RegionKey:
    return layer, chunk // REGION_CHUNKS, slot_bytes


class SlotAllocator:
    """Gives chunks slots such that consecutive chunks of a layer are neighbours, in whatever order they come.

    The file is cut into regions, each for sixteen consecutive chunks of one layer and one slot size; a
    chunk's slot in its region follows from its index. Regions are address space of a sparse file: what
    is not written costs nothing. A chunk that is written anew while its old copy still counts gets a slot
    in a second region, so that a crash finds one of the two whole. A region without slots is free space.
    """

    def __init__(self) -> None:
        self._regions: dict[_RegionKey, dict[int, set[int]]] = {}
        self._free = RangeSet()
        self._end_bytes = 0

    @property
    def end_bytes(self) -> int:
        """No region reaches beyond this offset."""
        return self._end_bytes

    def allocate(self, layer: int, chunk: int, slot_bytes: int) -> SwapSlot:
        """Take a slot for a chunk; `slot_bytes` is the size class of its payload, in whole pages."""
        regions = self._regions.setdefault(_region_key(layer, chunk, slot_bytes), {})
        start = next((start for start, taken in regions.items() if chunk not in taken), None)
        if start is None:
            start = self._take_space(REGION_CHUNKS * slot_bytes)
            regions[start] = set()
        regions[start].add(chunk)
        return SwapSlot(layer, chunk, start + chunk % REGION_CHUNKS * slot_bytes, slot_bytes)

    def _take_space(self, size_bytes: int) -> int:
        free = self._free.best_fit(size_bytes)
        if free is not None:
            self._free.discard(free[0], free[0] + size_bytes)
            return free[0]
        start = self._end_bytes
        self._end_bytes += size_bytes
        return start

    def adopt(self, slot: SwapSlot) -> bool:
        """Take a slot that a journal names. False, and not taken: it overlaps something else."""
        start, end = slot.region_start, slot.region_start + slot.region_bytes
        regions = self._regions.get(_region_key(slot.layer, slot.chunk, slot.slot_bytes), {})
        if start not in regions and not self._adopt_space(start, end):
            return False
        regions = self._regions.setdefault(_region_key(slot.layer, slot.chunk, slot.slot_bytes), regions)
        taken = regions.setdefault(start, set())
        if slot.chunk in taken:
            return False
        taken.add(slot.chunk)
        return True

    def _adopt_space(self, start: int, end: int) -> bool:
        if start < 0 or start >= end:
            return False
        if end > self._end_bytes:
            self._free.add(self._end_bytes, end)
            self._end_bytes = end
        if self._free.gaps(start, end):
            return False
        self._free.discard(start, end)
        return True

    def free(self, slot: SwapSlot) -> None:
        """Give a slot back.

        Raises:
            KeyError: it is not taken: two owners believe to have it.
        """
        key = _region_key(slot.layer, slot.chunk, slot.slot_bytes)
        regions = self._regions[key]
        regions[slot.region_start].remove(slot.chunk)
        if not regions[slot.region_start]:
            del regions[slot.region_start]
            self._free.add(slot.region_start, slot.region_start + slot.region_bytes)
        if not regions:
            del self._regions[key]
