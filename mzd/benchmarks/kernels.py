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
FIGURES: Final = ("gb_s", "gflop_s", "over_read", "over_copy", "over_llama_cpp")
"""Of a row, what the summary has too."""


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
    notes = [
        f"times by {clock}; memory {device.memory_kind}, kernels for a {device.kernel_class}",
        "weights, KV and activations are drawn from a seed; nothing is read from storage",
    ]
    if peers is None:
        notes.append("llama.cpp's binding is missing or the device is no CPU: over_llama_cpp is absent")
    return notes


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one launch.

    Attributes:
        own: of the kernel.
        read: of the plain read of the same bytes; None for what is none of our kernels.
        peer: of the faster of llama.cpp's kernels; None where it was not asked.
    """

    own: Series
    read: Series | None = None
    peer: Series | None = None


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
        series = copy_seconds(self.device, self.num_rounds, COPY_BYTES)
        work = Work(COPY, f"{COPY_BYTES >> 20} MiB", 0, 2 * COPY_BYTES, 0)
        self.copy_bytes_per_s = work.size_bytes / series.median
        self._add(work, COPY, Times(series))

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
        times = {name: series.scaled(1 / group.num_launches) for name, series in measured.items()}
        peer = min((times[name] for name in products), key=lambda series: series.median, default=None)
        for variant in group.variants:
            self._add(group.work, variant.name, Times(times[variant.name], times[READ], peer))

    def _add(self, work: Work, name: str, times: Times) -> None:
        row = kernel_row(work, name, times, self.copy_bytes_per_s)
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


def kernel_row(work: Work, name: str, times: Times, copy_bytes_per_s: float) -> Row:
    """One line of the table."""
    bytes_per_s = work.size_bytes / times.own.median
    return {
        "kernel": name,
        "shape": work.shape,
        "tokens": work.tokens,
        "gb_s": bytes_per_s / 1e9,
        "gflop_s": work.flops / times.own.median / 1e9 if work.flops else None,
        "over_read": None if times.read is None else ratio(times.own, times.read),
        "over_copy": bytes_per_s / copy_bytes_per_s,
        "over_llama_cpp": None if times.peer is None else ratio(times.own, times.peer),
        **times.own.fields("time"),
        **_fields(times.read, "read"),
        **_fields(times.peer, "llama_cpp"),
        "rounds": len(times.own.values),
    }


def _fields(series: Series | None, name: str) -> dict[str, float | None]:
    """Its columns, empty where nothing was measured."""
    return {f"{name}_s": None, f"{name}_spread_s": None} if series is None else dict(series.fields(name))


def summary_name(work: Work, name: str) -> str:
    """What the summary calls a kernel: attention by context and heads, the others whatever the shape."""
    if work.kernel == COPY:
        return name
    shape = f", {work.shape}" if work.kernel == "attention" else ""
    return f"{name}, {work.tokens} tokens{shape}"
