"""Owns the trial whether files can be read past the page cache right into the memory of units."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

from mzd.device.opencl import OpenClDevice

_PAGE_BYTES: Final = 4096
_UNIT_BYTES: Final = 64 * _PAGE_BYTES


def direct_read_refusal(device: OpenClDevice, path: str = sys.executable) -> str:
    """Read a page of `path` into a mapped unit; return why that does not work, empty if it does.

    A refusal costs a copy a read, no more. Memory of our own, page-aligned, takes such reads anyway.

    Raises:
        MzdError: the device has no room for a unit.
    """
    if device.owns_host_pages or device.memory_kind == "staged":
        return ""
    address = device.allocations.allocate(_UNIT_BYTES)
    host_address = device.allocations.map(address, _UNIT_BYTES, write=True)
    try:
        return _refusal(host_address, path)
    finally:
        device.allocations.unmap(address, host_address)
        device.allocations.free([address])


def _refusal(host_address: int, path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return f"not known, for {path} cannot be read so: {error.strerror}"
    page = (ctypes.c_ubyte * _PAGE_BYTES).from_address(host_address)
    try:
        os.preadv(fd, [page], 0)
    except OSError as error:
        place = "" if host_address % _PAGE_BYTES == 0 else ", for units are not page-aligned"
        return f"{error.strerror}{place}"
    finally:
        os.close(fd)
    return ""
