"""Owns the bench `overlap`: time to the first token in the four overlap modes, half of it in memory."""

from __future__ import annotations

from functools import partial

from mzd.benchmarks.daemon_harness import Asked, BenchDaemon
from mzd.benchmarks.restore_bench import Report
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.stages import measure_throughputs, stages_of
from mzd.benchmarks.statistics import Series, interleave, ratio, rounds
from mzd.benchmarks.workloads import HALF, Workload
from mzd.messages.restore_path import OverlapMode


async def measure_overlap(
    daemon: BenchDaemon, workload: Workload, result: BenchResult, report: Report
) -> dict[str, float]:
    """Time the modes in turn; the best possible is the sum of the stages of `mz_NO` over the bound."""
    last: dict[OverlapMode, Asked] = {}
    totals: list[float] = []

    async def run(mode: OverlapMode) -> float:
        last[mode] = await ask_after_eviction(daemon, mode, HALF)
        if mode is OverlapMode.NO:
            totals.append(stages_of(last[mode]).total_s)
        return last[mode].ttft_s

    contestants = {mode: partial(run, mode) for mode in OverlapMode}
    measured = await interleave(contestants, rounds(result.quick))
    prefill = await time_in_memory(daemon, rounds(result.quick))
    throughputs = await measure_throughputs(daemon, prefill.median)
    trace = last[OverlapMode.ARP].trace
    assert trace is not None
    bound_s = throughputs.bound_s(trace)
    for mode, series in measured.items():
        row = {
            **workload.fields(),
            "system": mode.value,
            "remaining": daemon.remaining,
            **series.fields("ttft"),
        }
        result.rows.append({**row, "bound_s": bound_s, "efficiency": bound_s / series.median})
        report(f"{mode.value}: {series.median:.3f} s, bound {bound_s:.3f} s")
    best = Series(tuple(totals[1:])).median / bound_s  # the first is the warm-up
    return _summary(measured, best)


def _summary(measured: dict[OverlapMode, Series], best: float) -> dict[str, float]:
    none = measured[OverlapMode.NO]
    no_over_arp = ratio(none, measured[OverlapMode.ARP])
    return {
        "ratio_no_over_arp": no_over_arp,
        "ratio_no_over_ar": ratio(none, measured[OverlapMode.AR]),
        "ratio_no_over_rp": ratio(none, measured[OverlapMode.RP]),
        "best_ratio": best,
        "overlap_of_best": no_over_arp / best,
    }


async def ask_after_eviction(daemon: BenchDaemon, mode: OverlapMode, remaining: float) -> Asked:
    """Evict, then ask in this mode."""
    daemon.set_overlap(mode)
    await daemon.evict_to(remaining)
    return await daemon.ask()


async def time_in_memory(daemon: BenchDaemon, num_rounds: int) -> Series:
    """The question with nothing evicted."""

    async def run() -> float:
        return (await daemon.ask()).ttft_s

    return (await interleave({"in-memory": run}, num_rounds))["in-memory"]
