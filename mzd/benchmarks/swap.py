"""Owns the bench `swap`: restoring by one path after the other beside both at once, and their balance."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import trio

from mzd.benchmarks.daemon_harness import BenchDaemon
from mzd.benchmarks.restore_bench import Report
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.stages import lane_spans
from mzd.benchmarks.statistics import Series, interleave, ratio, rounds
from mzd.benchmarks.workloads import HALF, Workload
from mzd.messages.restore_path import DecodeChunks
from mzd.policy.residency import UnitState

LEVELS: Final = (0.75, HALF, 0.25)
_POLL_S: Final = 0.001
_LOADING: Final = (UnitState.LOADING, UnitState.READING, UnitState.READING_COMPRESSED)


@dataclass(frozen=True, slots=True)
class PathTimes:
    """One restore by storage first, then by the in-memory swap; nothing of them overlaps."""

    storage_s: float
    memory_s: float

    @property
    def total_s(self) -> float:
        """One after the other."""
        return self.storage_s + self.memory_s

    @property
    def longer_s(self) -> float:
        """What both at once take at least."""
        return max(self.storage_s, self.memory_s)


async def measure_swap(
    daemon: BenchDaemon, workload: Workload, result: BenchResult, report: Report
) -> dict[str, float]:
    """All levels; the summary is of the one with half in memory."""
    levels = (HALF,) if result.quick else LEVELS
    summaries = {level: await _measure_level(daemon, workload, level, result, report) for level in levels}
    return summaries[HALF]


async def _measure_level(
    daemon: BenchDaemon, workload: Workload, level: float, result: BenchResult, report: Report
) -> dict[str, float]:
    paths: list[PathTimes] = []

    async def sequential() -> float:
        await daemon.evict_to(level)
        paths.append(await restore_in_sequence(daemon))
        return paths[-1].total_s

    async def parallel() -> float:
        await daemon.evict_to(level)
        return await daemon.restore()

    measured = await interleave({"sequential": sequential, "parallel": parallel}, rounds(result.quick))
    await daemon.ask()  # and with it: what came back both ways computes the same
    storage = Series(tuple(times.storage_s for times in paths[1:]))  # the first is the warm-up
    memory = Series(tuple(times.memory_s for times in paths[1:]))
    for name, series in (*measured.items(), ("storage path", storage), ("memory path", memory)):
        row = {**workload.fields(), "restore": name, "remaining": daemon.remaining}
        result.rows.append({**row, **series.fields("time")})
        report(f"{daemon.remaining:.2f} {name}: {series.median:.3f} s")
    return path_summary(ratio(measured["sequential"], measured["parallel"]), storage.median, memory.median)


def path_summary(ratio_found: float, storage_s: float, memory_s: float) -> dict[str, float]:
    """How near the measured ratio comes to that of paths that do not hinder each other."""
    times = PathTimes(storage_s, memory_s)
    return {
        "ratio_sequential_over_parallel": ratio_found,
        "swap_of_best": ratio_found / (times.total_s / times.longer_s),
        "path_imbalance": abs(storage_s - memory_s) / times.longer_s,
    }


async def restore_in_sequence(daemon: BenchDaemon) -> PathTimes:
    """Restore with the daemon's own actors, every decode held back until the last read has ended.

    The head unit is read last of all: it is resident, nothing is loading, so the storage path is done.
    """
    start_ns = time.monotonic_ns()
    async with _held_decodes(daemon) as gate, trio.open_nursery() as nursery:
        nursery.start_soon(daemon.restore)
        await _storage_path_done(daemon)
        release_ns = time.monotonic_ns()
        await gate.release()
    end_ns = time.monotonic_ns()
    reads = lane_spans(daemon.allocator.last_trace, ("read",))
    return PathTimes((max(span.end_ns for span in reads) - start_ns) / 1e9, (end_ns - release_ns) / 1e9)


@dataclass(slots=True)
class _Gate:
    """Stands between the allocator and the decompressors while it is closed."""

    held: trio.MemoryReceiveChannel[DecodeChunks]
    decompressors: trio.MemorySendChannel[DecodeChunks]

    async def release(self) -> None:
        """Pass on all that was held; more cannot come, since the allocator has dispatched everything."""
        while True:
            try:
                message = self.held.receive_nowait()
            except trio.WouldBlock:
                return
            await self.decompressors.send(message)


@asynccontextmanager
async def _held_decodes(daemon: BenchDaemon) -> AsyncIterator[_Gate]:
    ends = daemon.allocator.restore_ends
    original = ends.decodes
    # A message holds at least one chunk, so the allocator never waits for room.
    num_chunks = sum(cache.states.size for cache in daemon.parts.units.caches.values())
    to_gate, held = trio.open_memory_channel[DecodeChunks](num_chunks)
    ends.decodes = to_gate
    try:
        yield _Gate(held, original)
    finally:
        ends.decodes = original
        to_gate.close()
        held.close()


async def _storage_path_done(daemon: BenchDaemon) -> None:
    units = daemon.parts.units
    # The table tells nobody of its changes, and the trace says later when the last read really ended.
    while not (units.head.state is UnitState.RESIDENT and not _is_loading(daemon)):  # noqa: ASYNC110
        await trio.sleep(_POLL_S)


def _is_loading(daemon: BenchDaemon) -> bool:
    units = daemon.parts.units
    weights = any(unit.state in _LOADING for unit in units.weights)
    return weights or any(cache.count(_LOADING) for cache in units.caches.values())
