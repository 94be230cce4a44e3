"""Owns what the benches of eviction and restoration share: a daemon a workload, and one result for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from mzd.benchmarks.daemon_harness import BenchDaemon, open_daemon
from mzd.benchmarks.environment import drop_page_cache
from mzd.benchmarks.results import BenchResult, worst
from mzd.benchmarks.workloads import Workload

Report = Callable[[str], None]
Measure = Callable[[BenchDaemon, Workload, BenchResult, Report], Awaitable[dict[str, float]]]
"""Measures one workload: adds rows, returns its summary."""


async def run_restore_bench(
    bench: str, chosen: Sequence[Workload], measure: Measure, *, quick: bool, report: Report
) -> BenchResult:
    """Run one bench over all workloads; each summary key has the worst of them."""
    cold = drop_page_cache()
    result: BenchResult | None = None
    summaries: list[Mapping[str, float]] = []
    for workload in chosen:
        report(f"{bench}: {workload.model.name} with {workload.context_tokens} tokens")
        async with open_daemon(workload) as daemon:
            device = daemon.opened.device
            # Weights may be real; the KV is always drawn from a seed.
            result = result or BenchResult(bench, device.name, device.driver, quick, True, cold)
            summaries.append(await measure(daemon, workload, result, report))
            _note_storage(daemon, result)
    if result is None:
        raise ValueError("a bench needs a workload")
    result.summary |= worst(summaries)
    return result


def _note_storage(daemon: BenchDaemon, result: BenchResult) -> None:
    store = daemon.parts.store
    how = "with direct I/O" if store.direct else "through the page cache: the file system has no direct I/O"
    note = f"the weight store is read {how}; the KV of all contexts is drawn from a seed"
    if note not in result.notes:
        result.notes.append(note)
