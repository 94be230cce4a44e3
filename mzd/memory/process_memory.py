"""Owns what the kernel says about this process's memory."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from mzd.errors import MzdError

_PROC_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes of this process, and the file that said so (`smaps_rollup` or `statm`)."""

    rss_bytes: int
    source: str


def read_process_memory(proc: Path = _PROC_SELF) -> ProcessMemory:
    """Ask the kernel for the resident set.

    `smaps_rollup` walks the page tables and is exact. `statm` stands in where it is missing (a kernel
    before 4.14, a hardened /proc); its counters may lag by some pages a thread.

    Raises:
        MzdError: `internal`; neither can be read. Never zero: an unknown figure is not a small one.
    """
    for source, parse in (("smaps_rollup", _rss_of_rollup), ("statm", _rss_of_statm)):
        try:
            return ProcessMemory(parse((proc / source).read_text()), source)
        except (OSError, ValueError, IndexError):
            continue
    raise MzdError("internal", f"the resident set cannot be read below {proc}", path=str(proc))


def _rss_of_rollup(text: str) -> int:
    line = next((line for line in text.splitlines() if line.startswith("Rss:")), "")
    return int(line.split()[1]) * 1024


def _rss_of_statm(text: str) -> int:
    return int(text.split()[1]) * mmap.PAGESIZE
