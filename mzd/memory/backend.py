"""Owns the interface behind which every device's way to hold units is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class LeaseError(RuntimeError):
    """A lease was released twice, or belongs to another back end: a broken invariant, never bad luck."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Memory of one unit, held by one owner until it is given to `MemoryBackend.release`.

    Leases are told apart by identity: a new lease of the same address is another lease, and a stale one
    is refused. The back end knows a lease's state (reserved, populated, released); a lease does not.

    Attributes:
        address: where kernels find the unit. The host may use it too only between `begin_*` and `end_*`.
        size_bytes: what was asked for, in whole pages.
    """

    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """A back end's memory at one moment.

    Attributes:
        reserved_bytes: address space held from the device, whether resident or not.
        leased_bytes: bytes of all leases that are not released.
        populated_bytes: bytes that are resident.
        num_ranges: contiguous pieces that the resident bytes lie in; small is good.
        huge_pages: whether huge pages are asked for.
    """

    reserved_bytes: int
    leased_bytes: int
    populated_bytes: int
    num_ranges: int
    huge_pages: bool


class MemoryBackend(Protocol):
    """Memory that CPU and device share without a copy, in units that can be let go one by one.

    Whatever the device is, three promises hold: a kernel and the host see the same bytes of a unit
    without anybody copying them (a device with memory of its own stages inside `end_write`); a released
    unit's bytes leave the resident set before `release` returns; and `reserve_run` makes nothing
    resident that `populate` could make resident later.

    How back ends differ: an arena hands out ranges of one reservation and all of `begin_*` and `end_*`
    do nothing. One SVM allocation a unit: `reserve_run` allocates, `populate` touches, `release` frees;
    if the SVM is coarse, `begin_*` maps and `end_*` unmaps. A cl_mem is mapped likewise, and `begin_*`
    tells where.

    All methods may be called from any thread. They block; `populate` and `release` do so without the GIL.
    """

    def reserve_run(self, sizes: Sequence[int]) -> list[Lease]:
        """Reserve one unit per entry of `sizes` (bytes), in this order, side by side where possible.

        Give the units of a whole restore in the order in which they return: their eviction, which goes
        backward, then lets go of contiguous tails.

        Raises:
            MzdError: `insufficient_memory`; nothing is reserved then.
        """
        ...

    def populate(self, leases: Sequence[Lease]) -> None:
        """Make leases resident, ahead of those who write to them. Populated leases stay as they are.

        A fresh page reads as zeros. Nothing that is in a page already is changed.

        Raises:
            MzdError: `insufficient_memory`; the leases stay reserved, some may be populated.
            LeaseError: a lease is not out.
        """
        ...

    def release(self, leases: Sequence[Lease]) -> None:
        """End leases, populated or not. No kernel and no thread may be using them any more.

        Raises:
            LeaseError: a lease is not out, or appears twice; no lease is released then.
        """
        ...

    def begin_write(self, leases: Sequence[Lease]) -> list[int]:
        """Let the host write: return each lease's host address, valid until `end_write`."""
        ...

    def end_write(self, leases: Sequence[Lease]) -> None:
        """Let the device read what the host has written."""
        ...

    def begin_read(self, leases: Sequence[Lease]) -> list[int]:
        """Let the host read what the device has written: host addresses, valid until `end_read`."""
        ...

    def end_read(self, leases: Sequence[Lease]) -> None:
        """The host reads no more."""
        ...

    def statistics(self) -> MemoryStatistics:
        """Count everything that is held now."""
        ...
