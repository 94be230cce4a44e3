"""Owns the ceiling of a device's memory: how fast it copies one buffer to another."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import pyopencl as cl

from mzd.benchmarks.statistics import Series
from mzd.device.libopencl import opencl_error
from mzd.device.opencl import OpenClDevice
from mzd.device.selection import all_devices

COPY_BYTES: Final = 256 << 20


def copy_seconds(device: OpenClDevice, num_rounds: int, size_bytes: int) -> Series:
    """Seconds of a copy of `size_bytes` (`clEnqueueCopyBuffer`), which moves each byte twice.

    By the device's own clock, unless it is the host's cores. The copy has a context of its own.

    Raises:
        MzdError: `insufficient_memory` and the like; the device does not hold two such buffers.
    """
    try:
        return _measure(device, num_rounds, size_bytes)
    except cl.Error as error:
        raise opencl_error(error.code, "clEnqueueCopyBuffer") from error


def _measure(device: OpenClDevice, num_rounds: int, size_bytes: int) -> Series:
    handle = next(found for found in all_devices() if found.name.strip() == device.name)
    context = cl.Context([handle])
    properties = cl.command_queue_properties.PROFILING_ENABLE
    queue = cl.CommandQueue(context, handle, properties=properties)
    source, target = (cl.Buffer(context, cl.mem_flags.READ_WRITE, size_bytes) for _ in range(2))
    pattern = np.frombuffer(b"mzd ", np.uint32)
    for buffer in (source, target):  # the first touch is not the copy's
        cl.enqueue_fill_buffer(queue, buffer, pattern, 0, size_bytes)
    measured = [_seconds(device, queue, source, target, size_bytes) for _ in range(num_rounds + 1)]
    source.release()
    target.release()
    return Series(tuple(measured[1:]))


def _seconds(
    device: OpenClDevice, queue: cl.CommandQueue, source: cl.Buffer, target: cl.Buffer, size_bytes: int
) -> float:
    queue.finish()
    start_s = time.perf_counter()
    event = cl.enqueue_copy(queue, target, source, byte_count=size_bytes)
    event.wait()
    wall_s = time.perf_counter() - start_s
    profiled_s = (event.profile.end - event.profile.start) / 1e9
    return wall_s if device.kernel_class == "cpu" else profiled_s
