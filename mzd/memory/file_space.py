"""Owns giving a file's blocks back to the file system."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_OFF_T = ctypes.c_int64


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    """`fallocate(2)`, which the standard library lacks; None where the C library lacks it too."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("fallocate64", "fallocate"):
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes = (ctypes.c_int, ctypes.c_int, _OFF_T, _OFF_T)
            function.restype = ctypes.c_int
            return function  # type: ignore[no-any-return]
    return None


def punch_hole(fd: int, offset_bytes: int, size_bytes: int) -> bool:
    """Give the blocks of a range back; it then reads as zeros. False where the file system cannot.

    Raises:
        OSError: the range or the file is wrong, or the device fails.
    """
    fallocate = _fallocate()
    if fallocate is None:
        return False
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset_bytes, size_bytes) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))
