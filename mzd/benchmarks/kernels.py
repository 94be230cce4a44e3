"""Owns the bench `kernels`: how near each kernel comes to a plain read, to a copy, and to llama.cpp's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from mzd.benchmarks.copy_bandwidth import COPY_BYTES, copy_seconds
from mzd.benchmarks.ggml_matmul import GgmlMatmul
from mzd.benchmarks.ggml_peers import GgmlPeers, seconds
from mzd.benchmarks.kernel_clock import clock_for
from mzd.benchmarks.kernel_list import FULL, QUICK, MakeGroup, kernel_groups
from mzd.benchmarks.kernel_work import KernelGroup, Work
from mzd.benchmarks.results import BenchResult, Row, worst
from mzd.benchmarks.statistics import Series, interleave, ratio, rounds
from mzd.daemon.config import Config
from mzd.device.opencl import OpenClDevice
from mzd.device.trial_memory import TrialMemory

Report = Callable[[str], None]

READ: Final = "plain read"
COPY: Final = "copy"
RATIOS: Final = ("over_read", "over_copy", "over_llama_cpp")
FIGURES: Final = ("gb_s", "gflop_s", *RATIOS)


async def run_kernels(models: Sequence[str], *, quick: bool, report: Report) -> BenchResult:
    """Check and measure every kernel at the shapes of `models`, on the device that a daemon would take.

    Raises:
        MzdError: `device_lost`; there is none, or a kernel, which is named, computes wrongly: then there is
            no speed to speak of.
    """
    device = OpenClDevice.open(Config().device or None, keeps_times=True)
    try:
        groups = kernel_groups(models, QUICK if quick else FULL)
        return await measure_kernels(device, groups, quick=quick, report=report)
    finally:
        device.close()


async def measure_kernels(
    device: OpenClDevice, groups: Iterable[MakeGroup], *, quick: bool, report: Report
) -> BenchResult:
    """Check and measure `groups`, one after the other. Raises as `run_kernels`."""
    result = BenchResult("kernels", device.name, device.driver, quick, synthetic=True, cold=False)
    peers = GgmlPeers.find(device.compute_units) if device.kernel_class == "cpu" else None
    result.notes += _notes(device, peers)
    try:
        bench = _KernelBench(device, peers, result, report, rounds(quick))
        bench.measure_copy()
        for make in groups:
            await bench.measure(make)
        bench.conclude()
    finally:
        if peers is not None:
            peers.close()
    return result


def _notes(device: OpenClDevice, peers: GgmlPeers | None) -> list[str]:
    clock = "the host's clock, launches included" if device.kernel_class == "cpu" else "the device's own"
    notes = [f"times by {clock}; memory {device.memory_kind}, kernels for a {device.kernel_class}"]
    if peers is None:
        notes.append("llama.cpp's binding is missing or the device is no CPU: over_llama_cpp is absent")
    return notes


@dataclass(slots=True)
class _KernelBench:
    """One run of the bench."""

    device: OpenClDevice
    peers: GgmlPeers | None
    result: BenchResult
    report: Report
    num_rounds: int
    copy_bytes_per_s: float = 0.0
    figures: dict[str, list[Mapping[str, float]]] = field(default_factory=dict)

    def measure_copy(self) -> None:
        """The device's own copy, which moves each byte twice: what `over_copy` is a share of."""
        series = copy_seconds(self.device, self.num_rounds)
        work = Work(COPY, f"{COPY_BYTES >> 20} MiB", 0, 2 * COPY_BYTES, 0)
        self.copy_bytes_per_s = work.size_bytes / series.median
        self._add(work, COPY, series, {})

    async def measure(self, make: MakeGroup) -> None:
        """Make a group, check it, measure it, and free its memory."""
        memory = TrialMemory(self.device)
        try:
            group = make(memory)
            group.read.check()
            for variant in group.variants:
                variant.check()
            await self._measure_group(group)
        finally:
            memory.free()

    async def _measure_group(self, group: KernelGroup) -> None:
        clock = clock_for(self.device)
        contestants = {READ: _timed(partial(clock.seconds, group.read.enqueue))}
        for variant in group.variants:
            contestants[variant.name] = _timed(partial(clock.seconds, variant.enqueue))
        with ExitStack() as stack:
            products: Mapping[str, GgmlMatmul] = {}
            if self.peers is not None and group.peer is not None:
                products = stack.enter_context(self.peers.products(group.peer(), group.num_launches))
            contestants |= {name: _timed(partial(seconds, product)) for name, product in products.items()}
            measured = await interleave(contestants, self.num_rounds)
        per_launch = {name: series.scaled(1 / group.num_launches) for name, series in measured.items()}
        for variant in group.variants:
            ratios = _ratios(per_launch, variant.name, products)
            self._add(group.work, variant.name, per_launch[variant.name], ratios)

    def _add(self, work: Work, name: str, series: Series, ratios: Mapping[str, float]) -> None:
        over_copy = work.size_bytes / series.median / self.copy_bytes_per_s
        row = kernel_row(work, name, series, {"over_copy": over_copy, **ratios})
        self.result.rows.append(row)
        figures = {key: value for key in FIGURES if isinstance(value := row[key], float)}
        self.figures.setdefault(summary_name(work, name), []).append(figures)
        shown = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
        self.report(f"{name}, {work.shape}, {work.tokens} tokens: {shown}")

    def conclude(self) -> None:
        """Of each kernel the worst over all shapes."""
        self.result.summary["kernels"] = {name: worst(found) for name, found in self.figures.items()}


def _timed(measure: Callable[[], float]) -> Callable[[], Awaitable[float]]:
    """As `interleave` wants it."""

    async def timed() -> float:
        return measure()

    return timed


def _ratios(measured: Mapping[str, Series], name: str, peers: Iterable[str]) -> Mapping[str, float]:
    """Times of a kernel over those of the plain read, and of the fastest peer where there is one."""
    found = {"over_read": ratio(measured[name], measured[READ])}
    over_peers = [ratio(measured[name], measured[peer]) for peer in peers]
    return found | ({"over_llama_cpp": max(over_peers)} if over_peers else {})


def kernel_row(work: Work, name: str, series: Series, ratios: Mapping[str, float]) -> Row:
    """One line of the table; `series` are seconds of one launch."""
    return {
        "kernel": name,
        "shape": work.shape,
        "tokens": work.tokens,
        **series.fields("time"),
        "gb_s": work.size_bytes / series.median / 1e9,
        "gflop_s": work.flops / series.median / 1e9 if work.flops else None,
        **{key: ratios.get(key) for key in RATIOS},
        "rounds": len(series.values),
    }


def summary_name(work: Work, name: str) -> str:
    """What the summary calls a kernel: attention by context and heads, the others whatever the shape."""
    if work.kernel == COPY:
        return name
    shape = f", {work.shape}" if work.kernel == "attention" else ""
    return f"{name}, {work.tokens} tokens{shape}"
