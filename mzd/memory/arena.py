"""Owns the arena: units as ranges of a few large reservations, resident only where populated."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from mzd import native
from mzd.errors import MzdError
from mzd.memory.backend import Addresses, Lease, LeaseError, MemoryStatistics
from mzd.memory.huge_pages import forbid_huge_pages
from mzd.memory.range_set import Range, RangeSet
from mzd.policy.units import HUGE_PAGE_BYTES


class Reservation(Protocol):
    """Address space from the device; costs no resident memory until it is touched."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        ...

    @property
    def size_bytes(self) -> int:
        """Usable bytes."""
        ...

    def free(self) -> None:
        """Give the address space back, once."""
        ...


class PageControl(Protocol):
    """What the arena asks of the kernel; `mzd.native` implements it. Results are 0 or ``-errno``."""

    def populate(self, address: int, size_bytes: int, huge: bool, /) -> int:
        """Fault pages in for writing; with `huge`, 2 MiB pages where the range holds whole ones."""
        ...

    def lock(self, address: int, size_bytes: int, /) -> int:
        """Keep pages from being paged out."""
        ...

    def unlock(self, address: int, size_bytes: int, /) -> int:
        """Undo `lock`."""
        ...

    def release(self, address: int, size_bytes: int, /) -> int:
        """Give pages back to the system; afterwards the range reads as zeros."""
        ...


@dataclass(frozen=True, slots=True)
class _Run:
    """The bounds of what one `reserve_run` got in one piece."""

    start: int
    end: int


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _round_down(value: int, unit: int) -> int:
    return value // unit * unit


class Arena:
    """`MemoryBackend` for devices that work on our own pages (PoCL, imported host memory that is not pinned).

    Every range is in one of four states, and each state is one set: free, leased, of these populated,
    and busy while a thread changes pages without holding the lock.

    Args:
        reserve: gets address space from the device, e.g. `OpenClDevice.reserve_svm`; may raise MzdError.
        reservation_bytes: size of each reservation; at most what the device allocates in one piece. Where
            the device refuses that, shorter ones are taken.
        huge_pages: whether the system has them (`has_huge_pages`).
        lock_memory: keep populated leases from being paged out.
        pages: how pages come and go.

    Raises:
        ValueError: `reservation_bytes` is under 6 MiB: alignment would leave nothing.
    """

    def __init__(
        self,
        reserve: Callable[[int], Reservation],
        reservation_bytes: int,
        *,
        huge_pages: bool,
        lock_memory: bool = False,
        pages: PageControl = native,
    ) -> None:
        # Aligning both ends to huge pages costs less than two of them, wherever the reservation lies.
        self._unit_bytes_max = reservation_bytes - 2 * HUGE_PAGE_BYTES
        if self._unit_bytes_max < HUGE_PAGE_BYTES:
            raise ValueError("a reservation must hold three huge pages")
        self._reserve = reserve
        self._reservation_bytes = reservation_bytes
        self._huge_pages = huge_pages
        self._lock_memory = lock_memory
        self._pages = pages
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._reservations: list[Reservation] = []
        self._leases: dict[Lease, _Run] = {}
        self._leased_bytes = 0
        self._free = RangeSet()
        self._populated = RangeSet()
        self._busy = RangeSet()

    gives_pages_back = True

    def reserve_run(self, sizes: Sequence[int]) -> list[Lease]:
        """See `MemoryBackend.reserve_run`: one contiguous range, or several when none is long enough.

        Raises:
            MzdError: `insufficient_memory`: no address space is left, or a unit is longer than a reservation.
            ValueError: a size is not positive.
        """
        if any(size <= 0 for size in sizes):
            raise ValueError("a unit has at least one byte")
        rounded = [_round_up(size, native.PAGE_BYTES) for size in sizes]
        self._check_unit_sizes(rounded)
        with self._lock:
            leases: list[Lease] = []
            try:
                while len(leases) < len(rounded):
                    leases += self._take_piece(rounded[len(leases) :])
            except MzdError:
                self._give_back(leases)
                raise
            return leases

    def _check_unit_sizes(self, sizes: Sequence[int]) -> None:
        largest = max(sizes, default=0)
        if largest > self._unit_bytes_max:
            raise MzdError(
                "insufficient_memory",
                f"a unit of {largest} bytes is longer than the device's longest allocation allows",
                requested_bytes=largest,
                unit_bytes_max=self._unit_bytes_max,
            )

    def _take_piece(self, sizes: Sequence[int]) -> list[Lease]:
        """Lease as many of `sizes` as one free range holds, all of them if possible."""
        low, high = self._find_range(sum(sizes), sizes[0])
        ends = [end for end in accumulate(sizes) if end <= high - low]
        if not ends:
            raise MzdError(
                "insufficient_memory", "no free address space is long enough", requested_bytes=sizes[0]
            )
        start = self._place(low, high, ends[-1])
        run = _Run(start, start + ends[-1])
        self._free.discard(run.start, run.end)
        self._leased_bytes += ends[-1]
        leases = [Lease(start + end - size, size) for end, size in zip(ends, sizes[: len(ends)], strict=True)]
        self._leases.update(dict.fromkeys(leases, run))
        return leases

    def _find_range(self, size_bytes: int, first_bytes: int) -> Range:
        """The free range to take: one that holds `size_bytes`, else the longest; grow if that helps.

        A range is to hold `first_bytes` at least.
        """
        fit = self._free.best_fit(size_bytes)
        if fit is not None:
            return fit
        low, high = self._free.largest() or (0, 0)
        if high - low >= self._unit_bytes_max:
            return low, high  # a fresh reservation would be no longer
        try:
            self._grow(first_bytes if high - low < first_bytes else self._unit_bytes_max)
        except MzdError:
            if low == high:
                raise
            return low, high
        return self._free.best_fit(size_bytes) or self._free.largest() or (0, 0)

    def _grow(self, needed_bytes: int) -> None:
        """Add a reservation that holds `needed_bytes`."""
        reservation = self._reserve_at_least(needed_bytes + 2 * HUGE_PAGE_BYTES)
        self._reservations.append(reservation)
        start = _round_up(reservation.address, HUGE_PAGE_BYTES)
        end = _round_down(reservation.address + reservation.size_bytes, HUGE_PAGE_BYTES)
        forbid_huge_pages(start, end - start)
        self._free.add(start, end)

    def _reserve_at_least(self, least_bytes: int) -> Reservation:
        """Get the usual reservation, under a limit of addresses half of it, and so on to `least_bytes`."""
        size_bytes = self._reservation_bytes
        while True:
            try:
                return self._reserve(size_bytes)
            except MzdError as error:
                if size_bytes <= least_bytes:
                    raise _address_space_error(error) from error
                size_bytes = max(size_bytes // 2, least_bytes)

    @staticmethod
    def _place(low: int, high: int, size_bytes: int) -> int:
        """Start long runs on a huge page when there is room: their first and last pages are then huge too."""
        aligned = _round_up(low, HUGE_PAGE_BYTES)
        return aligned if size_bytes >= HUGE_PAGE_BYTES and aligned + size_bytes <= high else low

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            del self._leases[lease]
            self._leased_bytes -= lease.size_bytes
            self._free.add(lease.address, lease.address + lease.size_bytes)

    def populate(self, leases: Sequence[Lease]) -> None:
        """See `MemoryBackend.populate`. Piece by piece is fine: a huge page that two pieces of a run share
        comes with the first of them, so at most 2 MiB of the next piece are resident early.

        Raises:
            MzdError: `insufficient_memory`; the leases stay reserved, some may be populated.
            LeaseError: a lease is not out.
        """
        with self._lock:
            spans = self._merged(leases)
        for start, end, bounds in spans:
            while gaps := self._claim(start, end, bounds):
                self._fault_in(gaps)

    def _merged(self, leases: Sequence[Lease]) -> list[tuple[int, int, _Run]]:
        """Contiguous leases as spans, each with the bounds that its huge pages must keep to."""
        spans: list[tuple[int, int, _Run]] = []
        for lease in sorted(leases, key=lambda lease: lease.address):
            run = self._run_of(lease)
            start, end, bounds = lease.address, lease.address + lease.size_bytes, run
            if spans and spans[-1][1] == start:
                previous, _, before = spans.pop()
                start, bounds = previous, _Run(before.start, run.end)
            spans.append((start, end, bounds))
        return spans

    def _run_of(self, lease: Lease) -> _Run:
        try:
            return self._leases[lease]
        except KeyError:
            raise LeaseError(
                f"the lease of {lease.size_bytes} bytes at {lease.address:#x} is not out"
            ) from None

    def _claim(self, start: int, end: int, bounds: _Run) -> list[Range]:
        """What this thread is to fault in for ``[start, end)``; empty when all of it is resident.

        Parts that another thread is faulting in are waited for, and taken over if that thread fails.
        """
        with self._lock:
            while True:
                gaps = self._populated.gaps(*self._widen(start, end, bounds))
                if gaps:
                    self._mark_busy(gaps)
                    for low, high in gaps:
                        self._populated.add(low, high)
                    return gaps
                if not self._busy.overlaps(start, end):
                    return []
                self._idle.wait()

    def _widen(self, start: int, end: int, bounds: _Run) -> Range:
        """Grow ``[start, end)`` to whole huge pages where these are all the run's own."""
        first = _round_down(start, HUGE_PAGE_BYTES)
        last = _round_up(end, HUGE_PAGE_BYTES)
        low = first if self._is_whole(first, first + HUGE_PAGE_BYTES, bounds) else start
        high = last if self._is_whole(last - HUGE_PAGE_BYTES, last, bounds) else end
        return low, high

    def _is_whole(self, low: int, high: int, bounds: _Run) -> bool:
        inside = bounds.start <= low and high <= bounds.end
        taken = self._free.overlaps(low, high) or self._busy.overlaps(low, high)
        return self._huge_pages and inside and not taken

    def _lock_error(self, code: int) -> MzdError:
        needed_bytes = self.statistics().populated_bytes
        return MzdError(
            "insufficient_memory",
            f"lock_memory needs RLIMIT_MEMLOCK to be at least {needed_bytes} bytes: {os.strerror(-code)}",
            needed_bytes=needed_bytes,
            errno=-code,
        )

    def _mark_busy(self, ranges: Sequence[Range]) -> None:
        for low, high in ranges:
            self._busy.add(low, high)

    def _mark_idle(self, ranges: Sequence[Range]) -> None:
        for low, high in ranges:
            self._busy.discard(low, high)
        self._idle.notify_all()

    def _fault_in(self, gaps: Sequence[Range]) -> None:
        """Populate claimed gaps; on failure leave none of them populated."""
        try:
            for low, high in gaps:
                self._populate_gap(low, high)
        except MzdError:
            for low, high in gaps:
                self._drop_pages(low, high)
            with self._lock:
                for low, high in gaps:
                    self._populated.discard(low, high)
            raise
        finally:
            with self._lock:
                self._mark_idle(gaps)

    def _populate_gap(self, low: int, high: int) -> None:
        code = self._pages.populate(low, high - low, self._huge_pages)
        if code:
            raise _populate_error(code, high - low)
        code = self._pages.lock(low, high - low) if self._lock_memory else 0
        if code:
            raise self._lock_error(code)

    def release(self, leases: Sequence[Lease]) -> None:
        """See `MemoryBackend.release`. Waits for a thread that is populating a huge page of a neighbour.

        Raises:
            LeaseError: a lease is not out, or appears twice; no lease is released then.
            OSError: the kernel refused; the pages stay leased.
        """
        with self._lock:
            if len(set(leases)) != len(leases):
                raise LeaseError("a lease appears twice in one release")
            spans = [(start, end) for start, end, _ in self._merged(leases)]
            self._idle.wait_for(lambda: not any(self._busy.overlaps(*span) for span in spans))
            self._merged(leases)  # again: another thread may have released them while we waited
            self._mark_busy(spans)
        try:
            for start, end in spans:
                self._drop_pages(start, end)
            with self._lock:
                self._forget(leases, spans)
        finally:
            with self._lock:
                self._mark_idle(spans)

    def _drop_pages(self, start: int, end: int) -> None:
        # Unlocked first: locked address space counts against the limit even without a page in it.
        code = self._pages.unlock(start, end - start) if self._lock_memory else 0
        code = code or self._pages.release(start, end - start)
        if code:
            raise OSError(-code, f"cannot release pages: {os.strerror(-code)}")

    def _forget(self, leases: Sequence[Lease], spans: Sequence[Range]) -> None:
        for start, end in spans:
            self._populated.discard(start, end)
        self._give_back(leases)

    def writing(self, addresses: Addresses, sizes: Addresses) -> AbstractContextManager[Addresses]:
        """Shared memory: the host writes at the units' own addresses; a later kernel sees it."""
        return nullcontext(addresses)

    def reading(self, addresses: Addresses, sizes: Addresses) -> AbstractContextManager[Addresses]:
        """Shared memory: the host reads at the units' own addresses."""
        return nullcontext(addresses)

    def statistics(self) -> MemoryStatistics:
        """See `MemoryBackend.statistics`."""
        with self._lock:
            return MemoryStatistics(
                reserved_bytes=sum(reservation.size_bytes for reservation in self._reservations),
                leased_bytes=self._leased_bytes,
                populated_bytes=self._populated.total,
                num_ranges=len(self._populated),
                huge_pages=self._huge_pages,
            )

    def close(self) -> None:
        """Free all reservations.

        Raises:
            LeaseError: a lease is still out.
        """
        with self._lock:
            if self._leases:
                raise LeaseError(f"{len(self._leases)} leases are out")
            for reservation in self._reservations:
                reservation.free()
            self._reservations.clear()
            self._free = RangeSet()


def _address_space_error(error: MzdError) -> MzdError:
    advice = (
        "a limit of address space (ulimit -v, LimitAS=) helps when raised, else a smaller model or context"
    )
    return MzdError(error.code, f"{error.message}; {advice}", **error.data)


def _populate_error(code: int, size_bytes: int) -> MzdError:
    return MzdError(
        "insufficient_memory",
        f"the system gave no pages for {size_bytes} bytes: {os.strerror(-code)}",
        requested_bytes=size_bytes,
        errno=-code,
    )
