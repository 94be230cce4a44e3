"""Owns page-level memory work through ctypes, for installations without the C extension."""

from __future__ import annotations

import ctypes
import errno
import mmap
from typing import Any, Final

from mzd.native.arguments import check_range, check_unsigned

PAGE_BYTES: Final = mmap.PAGESIZE

_HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_MADV_DONTNEED: Final = 4
_MADV_HUGEPAGE: Final = 14
_MADV_NOHUGEPAGE: Final = 15
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_DONTNEED_LOCKED: Final = 24  # Linux 5.18
_M_MMAP_THRESHOLD: Final = -3
_INT_MAX: Final = 2**31 - 1

_libc: Final = ctypes.CDLL(None, use_errno=True)
for _name in ("mlock", "munlock"):
    getattr(_libc, _name).argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def _result(status: int) -> int:
    return 0 if status == 0 else -ctypes.get_errno()


def _advise(address: int, size: int, advice: int) -> int:
    return _result(_libc.madvise(address, size, advice))


def _check_pages(address: int, size: int) -> None:
    if size % PAGE_BYTES:
        raise ValueError(f"size {size} is not a multiple of the page size {PAGE_BYTES}")
    check_range(address, size, "address", alignment=PAGE_BYTES)


def _inside(address: int, size: int, unit: int) -> tuple[int, int]:
    """Start and size of the whole units inside a range; size 0 if there is none."""
    first = -(-address // unit) * unit
    return first, max(0, (address + size) // unit * unit - first)


def _bring_in(address: int, size: int) -> int:
    result = _advise(address, size, _MADV_POPULATE_WRITE)
    if result != -errno.EINVAL:
        return result
    for page in range(address, address + size, PAGE_BYTES):  # before Linux 5.14: write what is there
        byte = ctypes.c_uint8.from_address(page)
        byte.value = byte.value
    return 0


def populate(address: int, size: int, huge: bool) -> int:
    """Make pages resident and writable, their content unchanged.

    Args:
        address: a multiple of PAGE_BYTES.
        size: bytes, a multiple of PAGE_BYTES.
        huge: ask for huge pages where whole ones fit; small ones come where the system has none.

    Returns:
        0 or -errno; after a failure some pages may be resident.

    Raises:
        ValueError: address or size is not on a page.
    """
    _check_pages(address, size)
    first, huge_size = _inside(address, size, _HUGE_PAGE_BYTES)
    is_advised = huge and huge_size > 0 and _advise(first, huge_size, _MADV_HUGEPAGE) == 0
    result = _bring_in(address, size)
    if is_advised:  # pages stay huge, but khugepaged must not fill holes that a later release leaves
        _advise(first, huge_size, _MADV_NOHUGEPAGE)
    return result


def release(address: int, size: int, /) -> int:
    """Give pages back to the system, locked ones too; a later read finds zeros. 0 or -errno.

    Raises:
        ValueError: address or size is not on a page.
    """
    _check_pages(address, size)
    result = _advise(address, size, _MADV_DONTNEED)
    if result == -errno.EINVAL:  # locked pages
        result = _advise(address, size, _MADV_DONTNEED_LOCKED)
    if result == -errno.EINVAL and _libc.munlock(address, size) == 0:  # locked, before Linux 5.18
        result = _advise(address, size, _MADV_DONTNEED)
    return result


def release_inside(address: int, size: int) -> int:
    """Release the whole pages inside a range that need not start or end on one. 0 or -errno."""
    first, inside_size = _inside(address, size, PAGE_BYTES)
    return release(first, inside_size) if inside_size > 0 else 0


def lock(address: int, size: int, /) -> int:
    """Keep pages from being swapped out. 0 or -errno (ENOMEM or EPERM: above RLIMIT_MEMLOCK)."""
    _check_pages(address, size)
    return _result(_libc.mlock(address, size))


def unlock(address: int, size: int, /) -> int:
    """Undo `lock`. 0 or -errno."""
    _check_pages(address, size)
    return _result(_libc.munlock(address, size))


def resident_bytes(address: int, size: int, /) -> int:
    """Bytes of the range's pages that are in memory.

    Raises:
        ValueError: address or size is not on a page, or the range is not mapped.
    """
    _check_pages(address, size)
    if size == 0:
        return 0
    in_memory = (ctypes.c_uint8 * (size // PAGE_BYTES))()
    if _libc.mincore(address, size, in_memory) != 0:
        raise ValueError(f"mincore: errno {ctypes.get_errno()}")
    return sum(flag & 1 for flag in in_memory) * PAGE_BYTES


def fill(address: int, size: int, byte: int, /) -> None:
    """Set every byte."""
    check_range(address, size, "address")
    ctypes.memset(address, check_unsigned(byte, 255), size)


def copy(dst: int, src: int, size: int, /) -> None:
    """Copy bytes; the ranges may overlap."""
    check_range(dst, size, "dst")
    check_range(src, size, "src")
    ctypes.memmove(dst, src, size)


def _heap_call(name: str) -> Any | None:
    """A function of glibc's heap, None where the C library has another heap."""
    try:
        return getattr(_libc, name)
    except AttributeError:
        return None


def trim_heap() -> bool:
    """Give the C library's free memory back; False where it cannot."""
    malloc_trim = _heap_call("malloc_trim")
    if malloc_trim is None:
        return False
    malloc_trim(ctypes.c_size_t(0))
    return True


def set_mmap_threshold(threshold_bytes: int, /) -> bool:
    """Give blocks of at least this size a mapping of their own; False where the C library cannot."""
    mallopt = _heap_call("mallopt")
    check_unsigned(threshold_bytes, _INT_MAX)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, threshold_bytes) == 1
