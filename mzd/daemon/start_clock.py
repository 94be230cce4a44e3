"""Owns the account of a start: how long since the process began, and which part took how much of it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)


class StartClock:
    """Counts from the moment when the process began, so that the interpreter and imports are in it.

    Parts are logged at debug level. They may run in several threads at once, so their times may add up to
    more than the whole.
    """

    def __init__(self) -> None:
        self._age_s = process_age_s()
        self._origin_s = time.perf_counter()
        log.debug("start: part=imports wall_s=%.3f cpu_s=%.3f", self._age_s, time.process_time())

    def elapsed_s(self) -> float:
        """Seconds since the process began."""
        return self._age_s + time.perf_counter() - self._origin_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Log what the statement inside takes; CPU time is the calling thread's."""
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        yield
        wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
        log.debug("start: part=%s wall_s=%.3f cpu_s=%.3f", name, wall_s, cpu_s)

    def ready(self) -> float:
        """Log the sum; return the seconds since the process began."""
        ready_s = self.elapsed_s()
        log.debug("start: ready wall_s=%.3f cpu_s=%.3f", ready_s, time.process_time())
        return ready_s


def process_age_s(root: Path = Path("/")) -> float:
    """Seconds since this process began, to a hundredth; without /proc, its CPU time, which is less."""
    try:
        fields = (root / "proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
