"""Owns what a restore's trace says: its stages, its bytes, and the bound that no restore can beat."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import numpy as np
import trio

from mzd import native
from mzd.benchmarks.daemon_harness import KV_SEED, Asked, BenchDaemon
from mzd.benchmarks.kv_pattern import draw_chunks, row_addresses
from mzd.codec import Codec
from mzd.errors import MzdError
from mzd.memory.restore_trace import RestoreTrace, Span
from mzd.memory.workers import Workers
from mzd.model.weight_store import WeightStore

_READS: Final = 3
_DECODE_S: Final = 0.1
_RELOAD_LANES: Final = ("read", "decompress")


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of a request whose stages do not overlap (`mz_NO`)."""

    allocate_s: float
    reload_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        """One after the other."""
        return self.allocate_s + self.reload_s + self.prefill_s


def stages_of(asked: Asked) -> Stages:
    """Cut a request at the ends of its stages.

    Raises:
        ValueError: nothing was restored.
    """
    reload = lane_spans(asked.trace, _RELOAD_LANES)
    if asked.trace is None or not reload:
        raise ValueError("a request that restored nothing has no stages")
    reload_end_ns = max(span.end_ns for span in reload)
    return Stages(
        allocate_s=asked.trace.lane_seconds("allocate"),
        reload_s=(reload_end_ns - min(span.start_ns for span in reload)) / 1e9,
        prefill_s=(asked.step_end_ns - reload_end_ns) / 1e9,
    )


def lane_spans(trace: RestoreTrace | None, lanes: Sequence[str]) -> list[Span]:
    """The spans of some lanes."""
    return [] if trace is None else [span for span in trace.spans if span.lane in lanes]


@dataclass(frozen=True, slots=True)
class Throughputs:
    """What this machine can do now.

    Attributes:
        read_bytes_per_s: direct reads of the weight store, on the daemon's read threads.
        decode_bytes_per_s: FP16 bytes out of the codec, on one thread.
        prefill_s: the question with everything in memory.
        decode_threads: of a restore.
        cores: that this process may use.
        device_shares_cores: the OpenCL device is the same cores (PoCL).
    """

    read_bytes_per_s: float
    decode_bytes_per_s: float
    prefill_s: float
    decode_threads: int
    cores: int
    device_shares_cores: bool

    def bound_s(self, trace: RestoreTrace) -> float:
        """Seconds that no restore of the same bytes can beat."""
        read_bytes = sum(span.size_bytes for span in lane_spans(trace, ("read",)))
        decoded_bytes = sum(span.size_bytes for span in lane_spans(trace, ("decompress",)))
        store_s = read_bytes / self.read_bytes_per_s
        codec_cpu_s = decoded_bytes / self.decode_bytes_per_s
        if self.device_shares_cores:
            return max(store_s, codec_cpu_s / self.cores + self.prefill_s)
        return max(store_s, codec_cpu_s / self.decode_threads, self.prefill_s)


async def measure_throughputs(daemon: BenchDaemon, prefill_s: float) -> Throughputs:
    """Measure both paths alone; a third of a second or so."""
    threads = daemon.config.threads
    device = daemon.opened.device
    decode = partial(_decode_rate, daemon.parts.codec, daemon.parts.units.kv_sizes.chunk_bytes)
    return Throughputs(
        read_bytes_per_s=await _read_rate(daemon.parts.store, Workers("bench-read", threads.read)),
        decode_bytes_per_s=await trio.to_thread.run_sync(decode),
        prefill_s=prefill_s,
        decode_threads=threads.decompress,
        cores=device.compute_units if _is_pocl(device.driver) else threads.decompress,
        device_shares_cores=_is_pocl(device.driver),
    )


def _is_pocl(driver: str) -> bool:
    return driver.startswith("Portable Computing Language")


async def _read_rate(store: WeightStore, workers: Workers) -> float:
    """Bytes a second of all layers, each thread reading every n-th."""
    extents = store.index.layers
    total_bytes = sum(extent.size_bytes for extent in extents)
    seconds = []
    with mmap.mmap(-1, total_bytes) as area:
        base = np.frombuffer(area, np.uint8).ctypes.data
        native.fill(base, total_bytes, 0)
        places = base + np.cumsum([0] + [extent.size_bytes for extent in extents[:-1]]).astype(np.uint64)
        for _ in range(_READS):
            start_s = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for i in range(workers.threads):
                    mine = slice(i, None, workers.threads)
                    nursery.start_soon(workers.run, _read_layers, store, places[mine], mine)
            seconds.append(time.perf_counter() - start_s)
    return total_bytes / median(seconds)


def _read_layers(
    store: WeightStore, places: np.ndarray[tuple[int], np.dtype[np.uint64]], mine: slice
) -> None:
    extents = store.index.layers[mine]
    offsets = np.array([extent.offset_bytes for extent in extents], np.uint64)
    sizes = np.array([extent.size_bytes for extent in extents], np.uint64)
    if any(native.read_extents(store.fd, offsets, np.ascontiguousarray(places), sizes)):
        raise MzdError("weights_unavailable", f"{store.path} cannot be read")


def _decode_rate(codec: Codec, chunk_bytes: int) -> float:
    """FP16 bytes a second out of the codec on this thread."""
    chunks = draw_chunks(codec, chunk_bytes, seed=KV_SEED)
    payloads = np.zeros((len(chunks), codec.payload_bytes(chunk_bytes)), np.uint8)
    codec.encode_batch(row_addresses(chunks), row_addresses(payloads), chunk_bytes)
    done_bytes, start_s = 0, time.perf_counter()
    while time.perf_counter() < start_s + _DECODE_S:
        codec.decode_batch(row_addresses(payloads), row_addresses(chunks), chunk_bytes)
        done_bytes += chunks.nbytes
    return done_bytes / (time.perf_counter() - start_s)
