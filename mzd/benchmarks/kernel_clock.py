"""Owns how long kernels take: by the host's clock where the device is the host's cores, else by its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from mzd.device.launch_log import LaunchLog
from mzd.device.opencl import OpenClDevice


class KernelClock(Protocol):
    """Measures what is enqueued on a device with nothing else to do."""

    def seconds(self, enqueue: Callable[[], None]) -> float:
        """Enqueue, wait, and return the seconds that the kernels took.

        Raises:
            MzdError: a command failed.
        """
        ...


class HostClock:
    """From before the first launch to the end of the last: launches count, as they do for every caller."""

    def __init__(self, device: OpenClDevice) -> None:
        self._device = device

    def seconds(self, enqueue: Callable[[], None]) -> float:
        """See `KernelClock.seconds`."""
        start_s = time.perf_counter()
        enqueue()
        self._device.finish()
        return time.perf_counter() - start_s


class EventClock:
    """The sum of what the device itself says of each launch: time between launches does not count.

    Args:
        device: opened with `keeps_times`.
    """

    def __init__(self, device: OpenClDevice, launches: LaunchLog) -> None:
        self._device = device
        self._launches = launches

    def seconds(self, enqueue: Callable[[], None]) -> float:
        """See `KernelClock.seconds`."""
        with self._launches.recording():
            enqueue()
            self._device.finish()
            return sum(self._launches.durations_ns()) / 1e9


def clock_for(device: OpenClDevice) -> KernelClock:
    """What suits a device that was opened with `keeps_times`."""
    if device.kernel_class == "cpu" or device.launches is None:
        return HostClock(device)
    return EventClock(device, device.launches)
