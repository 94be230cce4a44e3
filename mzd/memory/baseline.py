"""Owns the resident set that the daemon has without any unit."""

from __future__ import annotations

from mzd.memory.process_memory import read_process_memory


class Baseline:
    """The resident set just before the first unit: interpreter, libraries, driver, scratch memory.

    Until it is settled it is whatever the process holds now, since all of that is baseline. It is settled
    once: measured again after each full eviction, it would hide what leaks.
    """

    def __init__(self) -> None:
        self._settled_bytes: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes, from the kernel."""
        return read_process_memory().rss_bytes if self._settled_bytes is None else self._settled_bytes

    def settle(self) -> None:
        """The first unit is about to become resident."""
        if self._settled_bytes is None:
            self._settled_bytes = read_process_memory().rss_bytes
