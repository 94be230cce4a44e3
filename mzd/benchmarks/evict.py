"""Owns the bench `evict`: time from the call to the first and to all bytes free, and what the kernel says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from mzd.benchmarks.daemon_harness import BenchDaemon
from mzd.benchmarks.restore_bench import Report
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.statistics import rounds, series_by
from mzd.benchmarks.workloads import Workload
from mzd.memory.process_memory import read_process_memory
from mzd.policy.units import PAGE_BYTES

REMAINING: Final = (0.75, 0.5, 0.0)
_SAMPLE_S: Final = 0.0005
_SURE_BYTES: Final = 512 * 1024
"""The kernel counts pages a core in batches: a smaller fall of the resident set may be none."""

_STATM: Final = Path("/proc/self/statm")
_QUANTITIES: Final = ("first_byte_s", "all_bytes_s", "all_bytes_s_per_gb", "resident_drop_over_freed")


@dataclass(slots=True)
class _FallWatch:
    """A thread's view of the resident set: when did it first fall for sure?"""

    from_bytes: int
    ended: threading.Event = field(default_factory=threading.Event)
    fell_s: float | None = None

    def run(self) -> None:
        """Look until it has fallen or nobody waits any more."""
        while self.fell_s is None and not self.ended.wait(_SAMPLE_S):
            if _resident_pages() * PAGE_BYTES <= self.from_bytes - _SURE_BYTES:
                self.fell_s = time.perf_counter()


def _resident_pages() -> int:
    return int(_STATM.read_text().split()[1])


@contextmanager
def _watch_fall() -> Iterator[_FallWatch]:
    watch = _FallWatch(_resident_pages() * PAGE_BYTES)
    thread = threading.Thread(target=watch.run, name="bench-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        thread.join()


async def measure_evict(
    daemon: BenchDaemon, workload: Workload, result: BenchResult, report: Report
) -> dict[str, float]:
    """All levels, first with chunks that are nowhere else, then with clean copies of all on flash."""
    summary: dict[str, float] = {}
    for with_copies in (False, True):
        for remaining in REMAINING:
            row = await _measure_level(daemon, workload, remaining, with_copies, rounds(result.quick))
            result.rows.append(row)
            report(
                f"to {remaining:.0%}, {'with' if with_copies else 'without'} copies: "
                f"{row['all_bytes_s_per_gb']:.3f} s a GB"
            )
            if with_copies and remaining == min(REMAINING):
                summary = {key: float(row[key]) for key in _QUANTITIES if key != "all_bytes_s"}
    return summary


async def _measure_level(
    daemon: BenchDaemon, workload: Workload, remaining: float, with_copies: bool, num_rounds: int
) -> dict[str, str | int | float]:
    measured = []
    for _ in range(num_rounds):
        await _prepare(daemon, workload, with_copies)
        measured.append(await _evict_once(daemon, remaining))
    series = series_by((*_QUANTITIES, "freed_bytes"), measured)
    return {
        **workload.fields(),
        "remaining": daemon.remaining,
        "copies": "on flash" if with_copies else "none",
        "freed_bytes": int(series["freed_bytes"].median),
        **{name: series[name].median for name in _QUANTITIES},
        "all_bytes_spread_s": series["all_bytes_s"].spread,
    }


async def _prepare(daemon: BenchDaemon, workload: Workload, with_copies: bool) -> None:
    """Everything in memory; with copies, everything has been on flash once and unchanged since."""
    if with_copies:
        await daemon.evict_to(0.0)
        await daemon.restore()
    else:
        await daemon.fill(workload.context_tokens)
    await trio.sleep(0.05)  # threads of the work before have given back their stacks and caches


async def _evict_once(daemon: BenchDaemon, remaining: float) -> dict[str, float]:
    before_bytes = read_process_memory().rss_bytes
    with _watch_fall() as watch:
        start_s = time.perf_counter()
        outcome = await daemon.evict_to(remaining)
        end_s = time.perf_counter()
    after_bytes = read_process_memory().rss_bytes
    elapsed_s = end_s - start_s
    # Not seen falling before the end: then it fell at the end at the latest.
    first_s = elapsed_s if watch.fell_s is None else watch.fell_s - start_s
    return {
        "first_byte_s": first_s,
        "all_bytes_s": elapsed_s,
        "all_bytes_s_per_gb": elapsed_s / (outcome.freed_bytes / 1e9),
        "freed_bytes": float(outcome.freed_bytes),
        "resident_drop_over_freed": (before_bytes - after_bytes) / outcome.freed_bytes,
    }
