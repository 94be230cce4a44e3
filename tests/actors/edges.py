"""Owns fake edges for tests of single actors: memory, threads and flash that take no time of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio

from mzd.errors import MzdError
from mzd.memory.backend import Lease, LeaseError, MemoryStatistics


class InlineWorkers:
    """Does the work at once, in the task that asks, after `delay_s` of virtual time."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        # As a thread does: what has begun ends, cancelled or not.
        with trio.CancelScope(shield=True):
            await trio.sleep(self.delay_s)
            result = work(*args)
        await trio.lowlevel.checkpoint_if_cancelled()
        return result


class HostMemory:
    """A back end's access to units that are the test's own arrays."""

    gives_pages_back = True

    def writing(self, addresses: Any, sizes: Any) -> Any:
        assert len(addresses) == len(sizes)
        return nullcontext(addresses)

    reading = writing


class FakeMemory:
    """Addresses without memory behind them; knows which leases are out."""

    def __init__(self, *, limit_bytes: int = 1 << 40) -> None:
        self.limit_bytes = limit_bytes
        self.out: set[Lease] = set()
        self.populated: list[Lease] = []
        self._next = 1 << 20

    def reserve_run(self, sizes: list[int]) -> list[Lease]:
        leases = []
        for size in sizes:
            leases.append(Lease(self._next, size))
            self._next += size
        self.out.update(leases)
        return leases

    def populate(self, leases: list[Lease]) -> None:
        if sum(lease.size_bytes for lease in [*self.populated, *leases]) > self.limit_bytes:
            raise MzdError("insufficient_memory", "the system gave no pages")
        assert self.out.issuperset(leases)
        self.populated += leases

    def release(self, leases: list[Lease]) -> None:
        if not self.out.issuperset(leases):
            raise LeaseError("released twice")
        self.out.difference_update(leases)
        self.populated = [lease for lease in self.populated if lease in self.out]

    def statistics(self) -> MemoryStatistics:
        return MemoryStatistics(0, sum(lease.size_bytes for lease in self.out), 0, 0, False)


class FakeStorage:
    """Knows which chunks are stored, under which offset; keeps no content."""

    def __init__(self, quota_bytes: int = 1 << 40) -> None:
        self.quota_bytes = quota_bytes
        self.stored: dict[Any, Any] = {}

    def allocate(self, chunks: list[Any]) -> list[Any]:
        return [SimpleNamespace(chunk=chunk, fd=9, offset_bytes=i) for i, chunk in enumerate(chunks)]

    def commit(self, written: list[tuple[Any, int]]) -> None:
        self.stored |= {write.chunk.unit: write for write, _ in written}

    def cancel(self, writes: list[Any]) -> None:
        """Nothing to give back."""

    def free(self, units: list[Any]) -> None:
        for unit in units:
            self.stored.pop(unit, None)

    def locate(self, unit: Any) -> Any:
        if unit not in self.stored:
            return None
        return SimpleNamespace(
            unit=unit, fd=9, offset_bytes=0, size_bytes=64, payload_bytes=64, crc_seed=0, crc=0
        )

    def statistics(self) -> Any:
        return SimpleNamespace(quota_bytes=self.quota_bytes, swap_bytes=0)


def is_closed(channel: Any) -> bool:
    """Whether the other end of a channel would find this one closed."""
    statistics = channel.statistics()
    return 0 in (statistics.open_send_channels, statistics.open_receive_channels)


def addresses_of(*arrays: np.ndarray) -> np.ndarray:
    """(arrays,) uint64: where each array's bytes lie."""
    return np.array([array.ctypes.data for array in arrays], np.uint64)
