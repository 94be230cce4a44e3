"""Owns the question whether the system has transparent huge pages, and keeping them out of a range."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages(path: Path = _ENABLED) -> bool:
    """Whether the system gives transparent huge pages to those who ask (`always` or `madvise`)."""
    try:
        return "[never]" not in path.read_text()
    except OSError:
        return False


def forbid_huge_pages(address: int, size_bytes: int) -> None:
    """Let a range get huge pages only where `native.populate` asks for them.

    Where the system's default is `always`, touching one page could make 2 MiB resident, and khugepaged
    would refill what a release has cut out. A kernel without huge pages refuses, and needs nothing.

    Args:
        address: on a page.
        size_bytes: whole pages.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(address, size_bytes, mmap.MADV_NOHUGEPAGE)
