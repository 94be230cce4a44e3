"""Owns the queue that kernels are enqueued in: launches one by one, noted down, or many in one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from mzd import native
from mzd.device.launch_log import LaunchLog
from mzd.device.libopencl import check, libopencl
from mzd.device.places import BufferMap

Size = tuple[int, ...]

_DIMENSIONS_MAX = 3


class Launchable(Protocol):
    """What a noted launch needs to know of its kernel; `BoundKernel` has it.

    Attributes:
        changes: how often the kernel has got another argument.
    """

    changes: int

    @property
    def name(self) -> str: ...
    @property
    def handle(self) -> int: ...
    @property
    def follows_pointers(self) -> bool: ...
    def declare_pointers(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as it was enqueued, of a kernel that had got `changes` arguments by then."""

    kernel: Launchable
    changes: int
    global_size: Size
    local_size: Size | None

    @property
    def words(self) -> list[int]:
        """The launch as `native.enqueue_launches` takes it."""
        return [
            self.kernel.handle,
            len(self.global_size),
            *_padded(self.global_size),
            *_padded(self.local_size or ()),
        ]


class LaunchQueue:
    """An in-order queue of the driver. Not thread-safe.

    Args:
        handle: the driver's, kept alive by its owner.
        buffers: where the device's memory is buffers, which of them an address lies in; None for SVM.
        log: where launches leave their events while it records; None on a queue that keeps no times.
    """

    def __init__(self, handle: int, buffers: BufferMap | None = None, log: LaunchLog | None = None) -> None:
        self.handle = handle
        self.buffers = buffers
        self._log = log
        self._noted: list[Launch] | None = None
        self._enqueue = libopencl().clEnqueueNDRangeKernel
        self._enqueue_address = ctypes.cast(self._enqueue, ctypes.c_void_p).value or 0

    def enqueue(self, kernel: Launchable, global_size: Size, local_size: Size | None) -> None:
        """Enqueue one launch; `local_size` None leaves the work-group to the driver.

        Raises:
            MzdError: the driver refused the launch.
        """
        event = None if self._log is None else self._log.next_event()
        status = self._enqueue(
            self.handle,
            kernel.handle,
            len(global_size),
            None,
            _size_array(global_size),
            None if local_size is None else _size_array(local_size),
            0,
            None,
            None if event is None else ctypes.byref(event),
        )
        check(status, "clEnqueueNDRangeKernel")
        if self._noted is not None:
            self._noted.append(Launch(kernel, kernel.changes, global_size, local_size))

    @contextmanager
    def noting(self) -> Iterator[list[Launch]]:
        """Collect the launches that are enqueued meanwhile."""
        assert self._noted is None, "launches are noted down for one reader at a time"
        self._noted = []
        try:
            yield self._noted
        finally:
            self._noted = None

    def enqueue_words(self, words: array[int], launches: Sequence[Launch]) -> None:
        """Enqueue noted `launches`, whose words these are, with the arguments that their kernels have now.

        Raises:
            MzdError: the driver refused a launch; those before it are enqueued.
        """
        if self._log is not None and self._log.is_recording:  # each launch has its own event
            for launch in launches:
                self.enqueue(launch.kernel, launch.global_size, launch.local_size)
            return
        num_enqueued, status = native.enqueue_launches(self._enqueue_address, self.handle, words)
        if status:
            check(status, f"clEnqueueNDRangeKernel({launches[num_enqueued].kernel.name})")


@lru_cache(maxsize=8192)
def _size_array(size: Size) -> ctypes.Array[ctypes.c_size_t]:
    """Return `size` as a C array; sizes repeat from step to step, so the array is kept."""
    return (ctypes.c_size_t * len(size))(*size)


def _padded(size: Size) -> Size:
    return size + (0,) * (_DIMENSIONS_MAX - len(size))
