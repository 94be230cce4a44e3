"""Owns units as allocations of the device, one each: where their pages are not ours to give back singly.

A driver that pins pages, or a device with memory of its own, frees memory only as it was allocated. So a
unit is an allocation, made by `populate` and freed by `release`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import numpy as np

from mzd.memory.backend import Addresses, Lease, LeaseError, MemoryStatistics
from mzd.memory.host_window import HostWindow
from mzd.policy.units import PAGE_BYTES


class UnitAllocator(Protocol):
    """What the device does; see `mzd.device.allocations.Allocations`. Everything blocks, without the GIL."""

    def allocate(self, size_bytes: int) -> int:
        """New zeroed memory; raises MzdError `insufficient_memory`."""
        ...

    def free(self, addresses: Sequence[int]) -> None:
        """Give allocations back."""
        ...

    def map(self, address: int, size_bytes: int, *, write: bool) -> int:
        """Let the host write (all of it) or read a range; where."""
        ...

    def unmap(self, address: int, host_address: int) -> None:
        """End a map."""
        ...

    def copy_in(self, address: int, host_address: int, size_bytes: int, *, wait: bool = True) -> None:
        """Copy to the device."""
        ...

    def copy_out(self, address: int, host_address: int, size_bytes: int, *, wait: bool = True) -> None:
        """Copy to the host."""
        ...


class _DeviceUnits(ABC):
    """The leases of a `MemoryBackend` that allocates each unit by itself."""

    gives_pages_back = False

    def __init__(self, allocator: UnitAllocator) -> None:
        self._allocator = allocator
        self._lock = threading.Lock()
        self._leases: set[Lease] = set()
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def reserve_run(self, sizes: Sequence[int]) -> list[Lease]:
        """See `MemoryBackend.reserve_run`: a promise only, for the device knows no reservations.

        Raises:
            ValueError: a size is not positive.
        """
        if any(size <= 0 for size in sizes):
            raise ValueError("a unit has at least one byte")
        leases = [Lease(0, -(-size // PAGE_BYTES) * PAGE_BYTES) for size in sizes]
        with self._lock:
            self._leases.update(leases)
        return leases

    def populate(self, leases: Sequence[Lease]) -> None:
        """See `MemoryBackend.populate`."""
        for lease in leases:
            self._check_out(lease)
            if not lease.address:
                address = self._allocator.allocate(lease.size_bytes)
                with self._lock:
                    insort(self._starts, address)
                    self._ends[address] = address + lease.size_bytes
                lease.address = address

    def release(self, leases: Sequence[Lease]) -> None:
        """See `MemoryBackend.release`. May wait for running kernels: some drivers do before they free."""
        with self._lock:
            if len(set(leases)) != len(leases):
                raise LeaseError("a lease appears twice in one release")
            for lease in leases:
                self._check_out(lease)
            self._leases.difference_update(leases)
            addresses = [lease.address for lease in leases if lease.address]
            for address in addresses:
                self._starts.remove(address)
                del self._ends[address]
        self._allocator.free(addresses)

    def writing(self, addresses: Addresses, sizes: Addresses) -> AbstractContextManager[Addresses]:
        """See `MemoryBackend.writing`."""
        return self._access(addresses, sizes, write=True)

    def reading(self, addresses: Addresses, sizes: Addresses) -> AbstractContextManager[Addresses]:
        """See `MemoryBackend.reading`."""
        return self._access(addresses, sizes, write=False)

    def statistics(self) -> MemoryStatistics:
        """See `MemoryBackend.statistics`."""
        with self._lock:
            leased_bytes = sum(lease.size_bytes for lease in self._leases)
            populated_bytes = sum(end - start for start, end in self._ends.items())
            return MemoryStatistics(
                reserved_bytes=populated_bytes,
                leased_bytes=leased_bytes,
                populated_bytes=populated_bytes,
                num_ranges=len(self._starts),
                huge_pages=False,
            )

    def close(self) -> None:
        """Nothing is left to free.

        Raises:
            LeaseError: a lease is still out.
        """
        if self._leases:
            raise LeaseError(f"{len(self._leases)} leases are still out")

    @contextmanager
    def _access(self, addresses: Addresses, sizes: Addresses, *, write: bool) -> Iterator[Addresses]:
        """The device's units among `addresses` through the host; what is the host's own stays as it is."""
        host = addresses.astype(np.uint64)
        ours = [i for i, address in enumerate(addresses.tolist()) if self._holds(address)]
        if not ours:
            yield host
            return
        with self._open(addresses[ours], sizes[ours], write=write) as opened:
            host[ours] = opened
            yield host

    @abstractmethod
    def _open(
        self, addresses: Addresses, sizes: Addresses, *, write: bool
    ) -> AbstractContextManager[Sequence[int]]:
        """Make ranges of units accessible to the host; host addresses."""

    def _holds(self, address: int) -> bool:
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            return index >= 0 and address < self._ends[self._starts[index]]

    def _check_out(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise LeaseError(f"the lease of {lease.size_bytes} bytes at {lease.address:#x} is not out")


class MappedUnits(_DeviceUnits):
    """Units that the host maps while it touches them: coarse-grain shared memory, or host-visible buffers.

    Fine-grain shared memory on pinned pages is the same, with maps that do nothing.
    """

    @contextmanager
    def _open(self, addresses: Addresses, sizes: Addresses, *, write: bool) -> Iterator[Sequence[int]]:
        with ExitStack() as maps:
            opened = []
            for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
                host_address = self._allocator.map(address, size, write=write)
                maps.callback(self._allocator.unmap, address, host_address)
                opened.append(host_address)
            yield opened


class StagedUnits(_DeviceUnits):
    """Units in the device's own memory: what the host writes or reads passes through pinned memory.

    Args:
        window: the pinned memory; a batch has to fit into it.
    """

    def __init__(self, allocator: UnitAllocator, window: HostWindow) -> None:
        super().__init__(allocator)
        self._window = window

    @contextmanager
    def _open(self, addresses: Addresses, sizes: Addresses, *, write: bool) -> Iterator[Sequence[int]]:
        with self._window.slots(sizes.tolist()) as slots:
            if not write:
                self._copy(self._allocator.copy_out, addresses, slots, sizes)
            yield slots
            if write:
                self._copy(self._allocator.copy_in, addresses, slots, sizes)

    @staticmethod
    def _copy(copy: _Copy, addresses: Addresses, slots: Sequence[int], sizes: Addresses) -> None:
        """Enqueue all copies and wait for the last: the queue runs them in order."""
        count = len(slots)
        for i, (address, slot, size) in enumerate(
            zip(addresses.tolist(), slots, sizes.tolist(), strict=True)
        ):
            copy(address, slot, size, wait=i == count - 1)


class _Copy(Protocol):
    def __call__(self, address: int, host_address: int, size_bytes: int, /, *, wait: bool) -> None: ...
