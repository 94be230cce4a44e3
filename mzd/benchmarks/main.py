"""Owns the list of benches and how one of them is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio

from mzd.benchmarks.breakdown import measure_breakdown
from mzd.benchmarks.engine import run_engine
from mzd.benchmarks.evict import measure_evict
from mzd.benchmarks.kernel_list import KERNEL_MODELS
from mzd.benchmarks.kernels import run_kernels
from mzd.benchmarks.order import measure_order
from mzd.benchmarks.overlap import measure_overlap
from mzd.benchmarks.restore_bench import Measure, run_restore_bench
from mzd.benchmarks.results import BenchResult
from mzd.benchmarks.swap import measure_swap
from mzd.benchmarks.workloads import ENGINE_MODELS, engine_models, workloads
from mzd.errors import MzdError

Report = Callable[[str], None]
ALL_WORKLOADS: Final = "all"


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench.

    Attributes:
        run: from the chosen workloads, `quick`, and whom to tell of progress.
        workloads: by name, what may be chosen; none where the bench has its own choice.
        quick_workloads: what `quick` runs unless asked for others.
    """

    run: Callable[[Sequence[str], bool, Report], Awaitable[BenchResult]]
    workloads: tuple[str, ...] = ()
    quick_workloads: tuple[str, ...] = ()

    def choose(self, workload: str | None, quick: bool) -> tuple[str, ...]:
        """The workloads to run.

        Raises:
            MzdError: `invalid_params`, naming those that there are.
        """
        if workload in self.workloads:
            return (workload,)
        if workload is None and quick:
            return self.quick_workloads
        if workload is None or (workload == ALL_WORKLOADS and self.workloads):
            return self.workloads
        known = [*self.workloads, ALL_WORKLOADS] if self.workloads else []
        raise MzdError(
            "invalid_params",
            f"the bench has no workload {workload!r}" + (f"; there are {', '.join(known)}" if known else ""),
            known=known,
        )


def run_benchmark(name: str, *, quick: bool, report: Report, workload: str | None = None) -> dict[str, Any]:
    """Run one bench.

    Args:
        quick: fewer points and rounds, under three minutes.
        report: called with a line for a person now and then.
        workload: one of the bench's workloads, or `all`; None: what it runs by itself.

    Returns:
        The JSON of the result.

    Raises:
        MzdError: `not_found` for the bench or its model, `invalid_params` for the workload, and what the
            bench itself meets.
    """
    if name not in BENCHES:
        raise MzdError(
            "not_found", f"there is no bench {name!r}; there are {', '.join(BENCHES)}", known=list(BENCHES)
        )
    bench = BENCHES[name]
    result: BenchResult = trio.run(bench.run, bench.choose(workload, quick), quick, report)
    return result.as_map()


async def _engine(names: Sequence[str], quick: bool, report: Report) -> BenchResult:
    return await run_engine(engine_models(names, report), quick=quick, report=report)


async def _kernels(names: Sequence[str], quick: bool, report: Report) -> BenchResult:
    return await run_kernels(names, quick=quick, report=report)


def _restore_bench(name: str, measure: Measure) -> Bench:
    async def run(_names: Sequence[str], quick: bool, report: Report) -> BenchResult:
        chosen = workloads(quick, report)
        return await run_restore_bench(name, chosen, measure, quick=quick, report=report)

    return Bench(run)


BENCHES: dict[str, Bench] = {
    "engine": Bench(_engine, ENGINE_MODELS, ENGINE_MODELS[:1]),
    "kernels": Bench(_kernels, KERNEL_MODELS, ("qwen3-0.6b",)),
    "breakdown": _restore_bench("breakdown", measure_breakdown),
    "evict": _restore_bench("evict", measure_evict),
    "order": _restore_bench("order", measure_order),
    "overlap": _restore_bench("overlap", measure_overlap),
    "swap": _restore_bench("swap", measure_swap),
}
