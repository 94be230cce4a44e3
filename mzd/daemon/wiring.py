"""Owns the map of the daemon: every part, every channel with its capacity and the reason for it.

EVICT    rpc, pressure_monitor -> allocator -> compressor | storage_writer -> allocator
RESTORE  rpc -> allocator -> storage_reader -> decompressor -> allocator -> gpu_prefill
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import trio

from mzd.actors.allocator import Allocator, AllocatorMessage, AllocatorSettings
from mzd.actors.compressor import Compressor
from mzd.actors.decompressor import Decompressor
from mzd.actors.evict_operation import EvictEnds, EvictParts
from mzd.actors.gpu_prefill import GpuPrefill
from mzd.actors.pressure_monitor import PressureMonitor
from mzd.actors.restore_operation import RestoreEnds, RestoreParts
from mzd.actors.storage_reader import StorageReader
from mzd.actors.storage_writer import StorageWriter
from mzd.codec import Codec
from mzd.daemon.config import Config, ThreadsConfig
from mzd.daemon.generation import ComputeClient
from mzd.device.engine import Engine
from mzd.memory.backend import MemoryBackend
from mzd.memory.baseline import Baseline
from mzd.memory.in_memory_swap import InMemorySwap
from mzd.memory.staging import StagingPool
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.unit_table import UnitTable
from mzd.memory.weight_extents import WeightExtents
from mzd.memory.workers import Workers
from mzd.messages.compute import RunStep
from mzd.messages.evict_path import CompressChunks, Evict, EvictFact, WriteChunks
from mzd.messages.restore_path import DecodeChunks, OverlapMode, Readiness, ReadUnits, RestoreFact
from mzd.model.weight_store import WeightStore
from mzd.policy.pressure import MemoryRoom

UBATCH_TOKENS = 512
"""Tokens of one prefill pass: long enough for the matrix kernels, short enough to bound scratch memory."""

STAGING_SLOT_BYTES = 4 * 1024 * 1024
STAGING_SLOTS = 4
"""Payloads between flash and the decompressor: a long layer in one message, and a few in flight."""


@dataclass(slots=True)
class Parts:
    """Everything with a lifetime, opened before the actors start."""

    engine: Engine
    store: WeightStore
    units: UnitTable
    memory: MemoryBackend
    payloads: InMemorySwap
    storage: StorageSwap
    staging: StagingPool
    codec: Codec
    room: Callable[[], MemoryRoom | None]
    baseline: Baseline


@dataclass(slots=True)
class System:
    """The wired daemon: who runs, and the ends that the service talks to."""

    allocator: Allocator
    gpu: GpuPrefill
    compute: ComputeClient
    to_allocator: trio.MemorySendChannel[AllocatorMessage]
    to_gpu: trio.MemorySendChannel[RunStep]
    monitor: PressureMonitor | None
    runs: list[Callable[[], Awaitable[None]]]

    async def aclose(self) -> None:
        """Begin the end: the allocator and gpu_prefill see their input close, the rest follows."""
        await self.to_gpu.aclose()
        await self.to_allocator.aclose()


MonitorFactory = Callable[[trio.MemorySendChannel[Evict]], PressureMonitor]


class Channels:
    """Every channel of the daemon: (send end, receive end). Actors get clones where several share an end."""

    def __init__(self, threads: ThreadsConfig) -> None:
        # The service's requests: a burst of cancels must not hold a cancelled task's cleanup back.
        self.allocator = trio.open_memory_channel[AllocatorMessage](64)
        # One generation at a time sends one step at a time.
        self.steps = trio.open_memory_channel[RunStep](1)
        # Reads and decodes: a few layers ahead of the threads, so that none runs dry between two messages.
        self.reads = trio.open_memory_channel[ReadUnits](4 * threads.read)
        self.decodes = trio.open_memory_channel[DecodeChunks](4 * threads.decompress)
        # Facts: the operation takes them as they come; room for one from each thread.
        self.restore_facts = trio.open_memory_channel[RestoreFact](threads.read + threads.decompress)
        # Readiness: gpu_prefill has a task that takes events at once; two ahead of it are plenty.
        self.readiness = trio.open_memory_channel[Readiness](2)
        # Eviction works in windows and waits for each: one batch a thread.
        self.compressions = trio.open_memory_channel[CompressChunks](threads.compress)
        self.writes = trio.open_memory_channel[WriteChunks](threads.write)
        self.evict_facts = trio.open_memory_channel[EvictFact](threads.compress + threads.write)


def wire(parts: Parts, config: Config, settings: AllocatorSettings, monitor: MonitorFactory | None) -> System:
    """Open every channel and make every actor; nobody runs yet."""
    channels = Channels(config.threads)
    workers = worker_groups(config.threads)
    allocator = Allocator(
        inbox=channels.allocator[1],
        restore_parts=_restore_parts(parts, workers["allocate"], OverlapMode(config.overlap)),
        restore_ends=RestoreEnds(
            channels.reads[0], channels.decodes[0].clone(), channels.restore_facts[1], channels.readiness[0]
        ),
        evict_parts=_evict_parts(parts, workers["allocate"], config.threads.compress),
        evict_ends=EvictEnds(channels.compressions[0], channels.writes[0], channels.evict_facts[1]),
        settings=settings,
        room=parts.room,
        baseline=parts.baseline,
    )
    gpu = GpuPrefill(parts.engine, parts.store, workers["embed"], channels.steps[1], channels.readiness[1])
    runs: list[Callable[[], Awaitable[None]]] = [allocator.run, gpu.run]
    runs += _restore_workers(parts, config.threads, channels, workers)
    runs += _evict_workers(parts, config.threads, channels, workers)
    watcher = monitor(channels.allocator[0].clone()) if monitor is not None else None
    if watcher is not None:
        allocator.became_evictable = watcher.look_now
        runs.append(watcher.run)
    compute = ComputeClient(channels.allocator[0], channels.steps[0], UBATCH_TOKENS)
    return System(allocator, gpu, compute, channels.allocator[0], channels.steps[0], watcher, runs)


def worker_groups(threads: ThreadsConfig) -> dict[str, Workers]:
    """One group a kind of work, so that none waits for threads that another holds."""
    cores = frozenset(threads.cores)
    kinds = {
        "read": threads.read,
        "decompress": threads.decompress,
        "allocate": threads.allocate,
        "write": threads.write,
        "compress": threads.compress,
        "embed": 1,
    }
    return {kind: Workers(kind, number, cores) for kind, number in kinds.items()}


def _restore_parts(parts: Parts, workers: Workers, overlap: OverlapMode) -> RestoreParts:
    index = parts.store.index
    return RestoreParts(
        units=parts.units,
        memory=parts.memory,
        weights=WeightExtents(parts.store.fd, index.layers, index.head, parts.store.check_identity),
        payloads=parts.payloads,
        storage=parts.storage,
        staging=parts.staging,
        workers=workers,
        overlap=overlap,
    )


def _evict_parts(parts: Parts, workers: Workers, compress_threads: int) -> EvictParts:
    return EvictParts(
        units=parts.units,
        memory=parts.memory,
        payloads=parts.payloads,
        storage=parts.storage,
        codec=parts.codec,
        workers=workers,
        compress_threads=compress_threads,
    )


def _restore_workers(
    parts: Parts, threads: ThreadsConfig, channels: Channels, workers: dict[str, Workers]
) -> Iterator[Callable[[], Awaitable[None]]]:
    """Readers and decompressors. The originals of shared ends are closed, or receivers never see the end."""
    (to_decodes, decodes), to_facts, reads = channels.decodes, channels.restore_facts[0], channels.reads[1]
    chunk_bytes = parts.units.kv_sizes.chunk_bytes
    with reads, to_decodes, decodes, to_facts:
        for _ in range(threads.read):
            yield StorageReader(
                parts.memory, workers["read"], reads.clone(), to_decodes.clone(), to_facts.clone()
            ).run
        for _ in range(threads.decompress):
            yield Decompressor(
                parts.memory,
                parts.codec,
                chunk_bytes,
                workers["decompress"],
                decodes.clone(),
                to_facts.clone(),
            ).run


def _evict_workers(
    parts: Parts, threads: ThreadsConfig, channels: Channels, workers: dict[str, Workers]
) -> Iterator[Callable[[], Awaitable[None]]]:
    """Compressors and writers, likewise."""
    compressions, writes, to_facts = channels.compressions[1], channels.writes[1], channels.evict_facts[0]
    with compressions, writes, to_facts:
        for _ in range(threads.compress):
            yield Compressor(
                parts.memory, parts.codec, workers["compress"], compressions.clone(), to_facts.clone()
            ).run
        for _ in range(threads.write):
            yield StorageWriter(parts.memory, workers["write"], writes.clone(), to_facts.clone()).run
