"""Owns the interface behind which every device's way to hold units is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class LeaseError(RuntimeError):
    """A lease was released twice, or belongs to another back end: a broken invariant, never bad luck."""


Addresses: TypeAlias = NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Lease:
    """Memory of one unit, held by one owner until it is given to `MemoryBackend.release`.

    Leases are told apart by identity: a new lease of the same address is another lease, and a stale one
    is refused. The back end knows a lease's state (reserved, populated, released); a lease does not.

    Attributes:
        address: where kernels find the unit, and 0 until `populate` where a unit is an allocation of its own.
            The host gets at it by `writing` and `reading` alone.
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
    """Memory of units that can be let go one by one.

    Whatever the device is, three promises hold: inside `writing` and `reading` the host gets at a unit's
    bytes, and after them the device has what was written; a released unit's bytes are free before `release`
    returns; and `reserve_run` takes no memory that `populate` could take later.

    `Arena` hands out ranges of one reservation of shared memory, whose pages are this process's own;
    `MappedUnits` and `StagedUnits` allocate each unit from the device.

    All methods may be called from any thread. They block; all but `reserve_run` do so without the GIL.

    Attributes:
        gives_pages_back: whether single pages of a populated unit may be released before the unit is.
    """

    @property
    def gives_pages_back(self) -> bool:
        """See above."""
        ...

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

    def writing(self, addresses: Addresses, sizes: Addresses) -> AbstractContextManager[Addresses]:
        """Let the host write ranges inside units, all of each; inside the context, where to.

        Args:
            addresses, sizes: (n,) uint64. An address that is in no unit is the host's own memory and stays
                as it is.

        When the context ends the device sees what was written.

        Raises:
            MzdError: the device failed.
        """
        ...

    def reading(self, addresses: Addresses, sizes: Addresses) -> AbstractContextManager[Addresses]:
        """Let the host read ranges inside units that no kernel is writing; likewise."""
        ...

    def statistics(self) -> MemoryStatistics:
        """Count everything that is held now."""
        ...

    def close(self) -> None:
        """Free what is held without being leased.

        Raises:
            LeaseError: a lease is still out.
        """
        ...
