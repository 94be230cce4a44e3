"""Owns the bench `breakdown`: allocation, reload and prefill of the baseline beside `mz_NO`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from mzd.benchmarks.daemon_harness import BenchDaemon
from mzd.benchmarks.models import cache_directory
from mzd.benchmarks.overlap import ask_after_eviction
from mzd.benchmarks.partial_offload import PartialOffload
from mzd.benchmarks.restore_bench import Report
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.stages import Stages, stages_of
from mzd.benchmarks.statistics import Series, interleave, ratio, rounds
from mzd.benchmarks.workloads import HALF, Workload
from mzd.errors import MzdError
from mzd.messages.restore_path import OverlapMode

BASELINE: Final = "partial-offload"
OURS: Final = OverlapMode.NO.value
_STAGES: Final[dict[str, Callable[[Stages], float]]] = {
    "allocate": lambda stages: stages.allocate_s,
    "reload": lambda stages: stages.reload_s,
    "prefill": lambda stages: stages.prefill_s,
}


async def measure_breakdown(
    daemon: BenchDaemon, workload: Workload, result: BenchResult, report: Report
) -> dict[str, float]:
    """Ask both in turn, from half of weights and KV in memory."""
    found: dict[str, list[Stages]] = {OURS: [], BASELINE: []}
    remaining: dict[str, float] = {}

    async def ours() -> float:
        found[OURS].append(stages_of(await ask_after_eviction(daemon, OverlapMode.NO, HALF)))
        remaining[OURS] = daemon.remaining
        return found[OURS][-1].total_s

    with open_baseline(daemon) as baseline:
        reference = (await daemon.ask()).logits

        async def theirs() -> float:
            remaining[BASELINE] = baseline.evict_to(HALF)
            times = await baseline.ask()
            check_logits(times.logits, reference)
            found[BASELINE].append(Stages(times.allocate_s, times.reload_s, times.prefill_s))
            return times.ttft_s

        await interleave({OURS: ours, BASELINE: theirs}, rounds(result.quick))
    return _conclude(workload, found, remaining, result, report)


def _conclude(
    workload: Workload,
    found: dict[str, list[Stages]],
    remaining: dict[str, float],
    result: BenchResult,
    report: Report,
) -> dict[str, float]:
    """A row a system and a stage; the ratios say how many times longer the baseline takes."""
    summary = {}
    for stage, seconds in _STAGES.items():
        series = {  # the first of each is the warm-up
            system: Series(tuple(seconds(stages) for stages in stages_list[1:]))
            for system, stages_list in found.items()
        }
        for system, times in series.items():
            row = {**workload.fields(), "system": system, "remaining": remaining[system], "stage": stage}
            result.rows.append({**row, **times.fields("time")})
        summary[f"ratio_{stage}"] = ratio(series[BASELINE], series[OURS])
        report(f"{stage}: {series[BASELINE].median:.3f} s against {series[OURS].median:.3f} s")
    return summary


@contextmanager
def open_baseline(daemon: BenchDaemon) -> Iterator[PartialOffload]:
    """The baseline beside a filled daemon."""
    with tempfile.TemporaryDirectory(prefix="offload-", dir=cache_directory()) as directory:
        baseline = PartialOffload(daemon, Path(directory))
        try:
            yield baseline
        finally:
            baseline.close()


def check_logits(found: np.ndarray, reference: np.ndarray) -> None:
    """A run that gives wrong tokens has no speed.

    Raises:
        MzdError: `internal`.
    """
    if not np.array_equal(found, reference):
        raise MzdError("internal", "the baseline gave other logits than the context in memory")
