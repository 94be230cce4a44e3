"""Owns the choice of memory for units: what the device's kind of memory allows."""

from __future__ import annotations

from contextlib import ExitStack

from mzd.device.opencl import OpenClDevice
from mzd.memory.arena import Arena
from mzd.memory.backend import MemoryBackend
from mzd.memory.device_units import MappedUnits, StagedUnits
from mzd.memory.host_window import HostWindow
from mzd.memory.huge_pages import has_huge_pages

WINDOW_BYTES = 32 * 1024 * 1024
"""Pinned memory of a staged device, kept while the daemon runs: pinning costs half a millisecond a MB. An
eviction's largest batch just fits; four threads with 8 MiB each copy as fast as the bus goes."""


def open_unit_memory(
    device: OpenClDevice, stack: ExitStack, *, huge_pages: bool, lock_memory: bool
) -> MemoryBackend:
    """Make the memory of units on `device`; `stack` frees what it holds beside the units.

    Raises:
        MzdError: ``insufficient_memory``: the driver pins no memory.
    """
    if device.owns_host_pages:
        return Arena(
            device.reserve_svm,
            device.reservation_bytes_max,
            huge_pages=huge_pages and has_huge_pages(),
            lock_memory=lock_memory,
        )
    if device.memory_kind != "staged":
        return MappedUnits(device.allocations)
    pinned = device.pin_host_memory(WINDOW_BYTES)
    stack.callback(pinned.free)
    return StagedUnits(device.allocations, HostWindow(pinned.address, pinned.size_bytes))
