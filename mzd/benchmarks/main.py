"""Owns the list of benches and how one of them is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from mzd.benchmarks.breakdown import measure_breakdown
from mzd.benchmarks.engine import engine_cases, run_engine
from mzd.benchmarks.evict import measure_evict
from mzd.benchmarks.models import real_model
from mzd.benchmarks.order import measure_order
from mzd.benchmarks.overlap import measure_overlap
from mzd.benchmarks.restore_bench import Measure, run_restore_bench
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.swap import measure_swap
from mzd.benchmarks.workloads import workloads
from mzd.errors import MzdError
from mzd.model.weight_store import WeightStore

Report = Callable[[str], None]
Bench = Callable[[bool, Report], Awaitable[BenchResult]]


def run_benchmark(name: str, *, quick: bool, report: Callable[[str], None]) -> dict[str, Any]:
    """Run one bench.

    Args:
        quick: fewer points and rounds, under three minutes.
        report: called with a line for a person now and then.

    Returns:
        The JSON of the result.

    Raises:
        MzdError: `not_found` for the bench or its model, and what the bench itself meets.
    """
    if name not in BENCHES:
        raise MzdError(
            "not_found", f"there is no bench {name!r}; there are {', '.join(BENCHES)}", known=list(BENCHES)
        )
    result: BenchResult = trio.run(BENCHES[name], quick, report)
    return result.as_map()


async def _engine(quick: bool, report: Report) -> BenchResult:
    model = real_model()
    with WeightStore.open(model.store_path) as store:
        context_length = store.index.config.context_length
    return await run_engine(model, engine_cases(quick, context_length), quick=quick, report=report)


def _restore_bench(name: str, measure: Measure) -> Bench:
    async def run(quick: bool, report: Report) -> BenchResult:
        chosen = workloads(quick, report)
        return await run_restore_bench(name, chosen, measure, quick=quick, report=report)

    return run


BENCHES: dict[str, Bench] = {
    "engine": _engine,
    "breakdown": _restore_bench("breakdown", measure_breakdown),
    "evict": _restore_bench("evict", measure_evict),
    "order": _restore_bench("order", measure_order),
    "overlap": _restore_bench("overlap", measure_overlap),
    "swap": _restore_bench("swap", measure_swap),
}
