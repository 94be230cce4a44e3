"""Owns the bench `order`: time to the first token after evictions in three orders, half of it in memory."""

from __future__ import annotations

from typing import Final

from mzd.benchmarks.daemon_harness import BenchDaemon
from mzd.benchmarks.restore_bench import Report
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.statistics import Series, ratio
from mzd.benchmarks.workloads import HALF, Workload
from mzd.policy.eviction_planner import Order

SEEDS: Final = 10
SEEDS_QUICK: Final = 3


async def measure_order(
    daemon: BenchDaemon, workload: Workload, result: BenchResult, report: Report
) -> dict[str, float]:
    """Time the orders in turn, a new random one each round."""
    seconds: dict[Order, list[float]] = {order: [] for order in Order}
    for seed in range(SEEDS_QUICK if result.quick else SEEDS):
        for order, ttft_s in (await _ask_in_each_order(daemon, workload, seed)).items():
            seconds[order].append(ttft_s)
    measured = {order: Series(tuple(found)) for order, found in seconds.items()}
    for order, series in measured.items():
        row = {**workload.fields(), "order": order.value, "remaining": daemon.remaining}
        result.rows.append({**row, **series.fields("ttft"), "rounds": len(series.values)})
        report(f"{order.value}: {series.median:.3f} s")
    backward = measured[Order.BACKWARD]
    return {
        "ratio_forward_out_over_backward_out": ratio(measured[Order.FORWARD], backward),
        "ratio_random_out_over_backward_out": ratio(measured[Order.RANDOM], backward),
    }


async def _ask_in_each_order(daemon: BenchDaemon, workload: Workload, seed: int) -> dict[Order, float]:
    """Seconds by order. The planner draws a random order from the context's name: a seed is a new context."""
    await daemon.fill(workload.context_tokens, context=f"seed-{seed}")
    await _ask(daemon, Order.BACKWARD)  # the first way out differs: no chunk has a copy on flash yet
    return {order: await _ask(daemon, order) for order in Order}


async def _ask(daemon: BenchDaemon, order: Order) -> float:
    daemon.set_order(order)
    await daemon.evict_to(HALF)
    return (await daemon.ask()).ttft_s
