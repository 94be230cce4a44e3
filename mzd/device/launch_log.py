"""Owns the device's own times of launches, kept while somebody asks for them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from mzd.device.libopencl import check, libopencl

_START, _END = 0x1282, 0x1283
"""CL_PROFILING_COMMAND_START and _END, cl.h."""


class LaunchLog:
    """The events of one queue's launches, from `recording` on. The queue was made to keep times."""

    def __init__(self) -> None:
        self._events: list[ctypes.c_void_p] | None = None

    @contextmanager
    def recording(self) -> Iterator[LaunchLog]:
        """Keep the events of all launches; at the end they are forgotten.

        Raises:
            RuntimeError: it is recording already.
        """
        if self._events is not None:
            raise RuntimeError("launches are being recorded already")
        self._events = []
        try:
            yield self
        finally:
            events, self._events = self._events, None
            for event in events:
                libopencl().clReleaseEvent(event)

    @property
    def is_recording(self) -> bool:
        """Whether launches have to leave their events."""
        return self._events is not None

    def next_event(self) -> ctypes.c_void_p | None:
        """Where a launch leaves its event; None: it need not."""
        if self._events is None:
            return None
        self._events.append(ctypes.c_void_p())
        return self._events[-1]

    def durations_ns(self) -> list[int]:
        """How long each recorded launch took on the device; the queue must be empty.

        Raises:
            MzdError: the driver does not know.
        """
        return [_time_ns(event, _END) - _time_ns(event, _START) for event in self._events or ()]


def _time_ns(event: ctypes.c_void_p, moment: int) -> int:
    time_ns = ctypes.c_uint64()
    status = libopencl().clGetEventProfilingInfo(event, moment, 8, ctypes.byref(time_ns), None)
    check(status, "clGetEventProfilingInfo")
    return time_ns.value
