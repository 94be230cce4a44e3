"""Owns the set of half-open ranges that address space, resident memory and file space are kept in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

Range = tuple[int, int]


class RangeSet:
    """Disjoint ranges ``[start, end)`` in ascending order; neighbours that touch are one range.

    Lookups take O(log n), changes O(n) of a memmove; n stays in the hundreds, since neighbours coalesce.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._total = 0

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def total(self) -> int:
        """Sum of the lengths of all ranges."""
        return self._total

    def _touching(self, start: int, end: int) -> tuple[int, int]:
        """Indices ``[first, last)`` of the ranges that overlap or touch ``[start, end)``."""
        return bisect_left(self._ends, start), bisect_right(self._starts, end)

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        """Indices ``[first, last)`` of the ranges that share at least one place with ``[start, end)``."""
        return bisect_right(self._ends, start), bisect_left(self._starts, end)

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any place of ``[start, end)`` is in the set."""
        first, last = self._overlapping(start, end)
        return first < last

    def covered(self, start: int, end: int) -> list[Range]:
        """The parts of ``[start, end)`` that are in the set, ascending."""
        first, last = self._overlapping(start, end)
        return [(max(self._starts[i], start), min(self._ends[i], end)) for i in range(first, last)]

    def gaps(self, start: int, end: int) -> list[Range]:
        """The parts of ``[start, end)`` that are not in the set, ascending."""
        gaps: list[Range] = []
        at = start
        for low, high in self.covered(start, end):
            if at < low:
                gaps.append((at, low))
            at = high
        if at < end:
            gaps.append((at, end))
        return gaps

    def add(self, start: int, end: int) -> None:
        """Add ``[start, end)``, none of which may be in the set yet.

        Raises:
            ValueError: it is empty, or a part of it is in the set: two owners claim one place.
        """
        if start >= end:
            raise ValueError(f"range [{start:#x}, {end:#x}) is empty")
        if self.overlaps(start, end):
            raise ValueError(f"range [{start:#x}, {end:#x}) is in the set already")
        first, last = self._touching(start, end)
        low = min([start, *self._starts[first:last]])
        high = max([end, *self._ends[first:last]])
        self._starts[first:last] = [low]
        self._ends[first:last] = [high]
        self._total += end - start

    def discard(self, start: int, end: int) -> int:
        """Take out whatever part of ``[start, end)`` is in the set; return its length."""
        first, last = self._overlapping(start, end)
        if first >= last:
            return 0
        removed = sum(high - low for low, high in self.covered(start, end))
        edges = [(self._starts[first], start), (end, self._ends[last - 1])]
        kept = [(low, high) for low, high in edges if low < high]
        self._starts[first:last] = [low for low, _ in kept]
        self._ends[first:last] = [high for _, high in kept]
        self._total -= removed
        return removed

    def best_fit(self, size: int) -> Range | None:
        """The smallest range that holds `size`, the lowest of equals; None when none does."""
        fitting = ((high - low, low, high) for low, high in self if high - low >= size)
        best = min(fitting, default=None)
        return None if best is None else (best[1], best[2])

    def largest(self) -> Range | None:
        """The longest range, the lowest of equals; None when the set is empty."""
        return max(self, key=lambda span: (span[1] - span[0], -span[0]), default=None)
