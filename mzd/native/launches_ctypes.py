"""Owns the enqueuing of a row of kernels through ctypes, for installations without the C extension."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_size_t, c_uint32, c_void_p
from typing import TYPE_CHECKING, Final

import numpy as np

from mzd.native.arguments import check_range, check_unsigned, unsigned_array

if TYPE_CHECKING:
    from mzd.native.arguments import BufferOrArray

_LAUNCH_WORDS: Final = 8
_DIMENSIONS_MAX: Final = 3

# clEnqueueNDRangeKernel: queue, kernel, dimensions, offset, global size, local size, then the events.
_ENQUEUE_KERNEL: Final = ctypes.CFUNCTYPE(
    c_int32, c_void_p, c_void_p, c_uint32, *[ctypes.POINTER(c_size_t)] * 3, c_uint32, c_void_p, c_void_p
)
_SIZES: Final = c_size_t * _DIMENSIONS_MAX


def enqueue_launches(function: int, queue: int, launches: BufferOrArray, /) -> tuple[int, int]:
    """Enqueue kernels in order up to the first that is refused: (how many were taken, the last status)."""
    check_range(function, 1, "function")
    check_unsigned(queue, 2**64 - 1)
    words = unsigned_array(launches, "launches", np.uint64)
    if len(words) % _LAUNCH_WORDS:
        raise ValueError(f"launches has {len(words)} words, no multiple of {_LAUNCH_WORDS}")
    rows = words.reshape(-1, _LAUNCH_WORDS).tolist()
    for i, (_, dimensions, *_) in enumerate(rows):
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise ValueError(f"launch {i} has {dimensions} dimensions")
    enqueue = _ENQUEUE_KERNEL(function)
    for i, (kernel, dimensions, *sizes) in enumerate(rows):
        global_size, local_size = _SIZES(*sizes[:_DIMENSIONS_MAX]), _SIZES(*sizes[_DIMENSIONS_MAX:])
        local = None if local_size[0] == 0 else local_size
        status = int(enqueue(queue, kernel, dimensions, None, global_size, local, 0, None, None))
        if status:
            return i, status
    return len(rows), 0
