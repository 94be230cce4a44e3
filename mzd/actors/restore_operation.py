"""Owns one restore from plan to last unit: allocation ahead, dispatch in forward order, readiness.

A part of the allocator actor: it runs in the allocator's task and changes the allocator's table.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import trio

from mzd.errors import MzdError
from mzd.memory.backend import Lease, MemoryBackend
from mzd.memory.in_memory_swap import InMemorySwap, Slot
from mzd.memory.restore_trace import RestoreTrace
from mzd.memory.staging import StagingBuffer, StagingPool
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import StoredChunk
from mzd.memory.unit_table import KvCache, Place, UnitTable
from mzd.memory.weight_extents import WeightExtents
from mzd.memory.workers import Workers
from mzd.messages.restore_path import (
    DecodeChunks,
    HeadReady,
    LayerReady,
    OverlapMode,
    Readiness,
    ReadUnits,
    RestoreFact,
    RestoreFailed,
    UnitsFailed,
    UnitsRestored,
)
from mzd.policy.residency import Event, UnitState
from mzd.policy.restore_planner import LayerRestore, RestorePlan
from mzd.policy.units import CHUNK_TOKENS, ChunkIndex, HeadUnit, KvUnit, LayerIndex, UnitId, WeightUnit

ALLOCATION_BYTES = 16 * 1024 * 1024
"""Memory populated in one go: a few milliseconds of work, and a lead that readers do not catch up with."""

BATCH_BYTES = 8 * 1024 * 1024
"""Chunks that travel in one message: enough work to pay for the thread hop, little enough to share out."""

HEAD = None
"""The place of the head unit among the layers' counters."""


@dataclass(slots=True)
class RestoreEnds:
    """The channel ends that a restore uses; the allocator owns them."""

    reads: trio.MemorySendChannel[ReadUnits]
    decodes: trio.MemorySendChannel[DecodeChunks]
    facts: trio.MemoryReceiveChannel[RestoreFact]
    readiness: trio.MemorySendChannel[Readiness]


@dataclass(slots=True)
class RestoreParts:
    """What a restore works on; all of it is the allocator's."""

    units: UnitTable
    memory: MemoryBackend
    weights: WeightExtents
    payloads: InMemorySwap
    storage: StorageSwap
    staging: StagingPool
    workers: Workers
    overlap: OverlapMode


@dataclass(slots=True)
class RestoreOperation:
    """One restore. `run` may be called once.

    Payloads that were decoded are left in `spent_payloads`: their segments are released after the restore,
    since unmapping waits for whoever faults pages in, and the first token would wait with it.

    Whatever happens, every unit is in a settled state when `run` returns: resident, or where it was, or
    (its copy being damaged) absent and cut off with all that lies behind it.
    """

    restore_id: int
    cache: KvCache
    plan: RestorePlan
    parts: RestoreParts
    ends: RestoreEnds
    announce: bool
    trace: RestoreTrace
    abandoned: bool = False
    afterwards: Callable[[], None] | None = None
    failure: MzdError | None = None
    spent_payloads: list[Slot] = field(default_factory=list)
    _leases: dict[UnitId, Lease] = field(default_factory=dict)
    _outstanding: dict[int | None, int] = field(default_factory=dict)
    _populated: set[UnitId] = field(default_factory=set)
    _progress: trio.Event = field(default_factory=trio.Event)
    _allocated: bool = False
    _in_flight: int = 0
    _dispatching: int = 2
    _receiving: trio.CancelScope = field(default_factory=trio.CancelScope)
    _lost_chunk: int | None = None
    _held_back: list[Readiness] = field(default_factory=list)

    async def run(self) -> None:
        """Bring everything of the plan back.

        Raises:
            MzdError: what stopped it: `insufficient_memory`, `weights_unavailable`, `corrupt_chunk` (with
                `keep_tokens`, what is still good), `cancelled` when it was abandoned.
        """
        self._count_outstanding()
        try:
            if self.failure is None and any(layer.weights_bytes for layer in self.plan.layers):
                await self.parts.workers.run(self.parts.weights.check)
            self._reserve()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._allocate)
                nursery.start_soon(self._dispatch, self._read_layers)
                nursery.start_soon(self._dispatch, self._decode_layers)
                await self._collect()
        except MzdError as error:
            self.failure = error
        finally:
            self._settle()
        await self._conclude()

    def _count_outstanding(self) -> None:
        for layer in self.plan.layers:
            self._outstanding[layer.layer] = len(layer.chunks) + (1 if layer.weights_bytes else 0)
        self._outstanding[HEAD] = 1 if self.plan.head_bytes else 0

    def _reserve(self) -> None:
        """One run of address space in the order of return, so that a later eviction lets go of a tail."""
        needs = self.plan.allocations
        leases = self.parts.memory.reserve_run([need.size_bytes for need in needs])
        self._leases = {need.unit: lease for need, lease in zip(needs, leases, strict=True)}

    @property
    def _stopped(self) -> bool:
        return self.abandoned or self.failure is not None

    # Allocation: runs ahead by itself, so that no read waits for pages that could be there.

    async def _allocate(self) -> None:
        try:
            for group in self._allocation_groups():
                if self._stopped:
                    break
                await self._populate(group)
                self._wake_dispatch(group)
        except MzdError as error:
            self.failure = self.failure or error
        self._allocated = True
        self._wake_dispatch([])

    def _allocation_groups(self) -> Iterator[Sequence[UnitId]]:
        """Memory for both paths in turn, each in forward order, so that neither waits for the other's pages.

        The first layer of each path by itself, since the device waits for it; then pieces that pay for their
        thread hop. Without overlap there is one piece.
        """
        if not self.parts.overlap.allocates_ahead:
            yield from [list(self._leases)] if self._leases else []
            return
        paths = [self._pieces(self._read_path), self._pieces(self._decode_path)]
        for pieces in zip_longest(*paths):
            yield from (piece for piece in pieces if piece)

    def _pieces(self, path: Callable[[LayerRestore], list[UnitId]]) -> Iterator[list[UnitId]]:
        piece: list[UnitId] = []
        wanted_bytes = 0
        for layer in self.plan.layers:
            piece += path(layer)
            if piece and sum(self._leases[unit].size_bytes for unit in piece) >= wanted_bytes:
                yield piece
                piece, wanted_bytes = [], ALLOCATION_BYTES
        if path == self._read_path and self.plan.head_bytes:
            piece.append(HeadUnit())
        yield piece

    def _read_path(self, layer: LayerRestore) -> list[UnitId]:
        """What comes from flash for one layer."""
        weights: list[UnitId] = [WeightUnit(layer.layer)] if layer.weights_bytes else []
        return [*weights, *self._kv_units(layer.layer, (*layer.read, *layer.read_decode))]

    def _decode_path(self, layer: LayerRestore) -> list[UnitId]:
        """What is made of memory alone for one layer: payloads in RAM, and room for new tokens."""
        return list(self._kv_units(layer.layer, (*layer.decode, *layer.allocate)))

    async def _populate(self, units: Sequence[UnitId]) -> None:
        start_ns = time.monotonic_ns()
        leases = [self._leases[unit] for unit in units]
        await self.parts.workers.run(self.parts.memory.populate, leases)
        size_bytes = sum(lease.size_bytes for lease in leases)
        self.trace.add("allocate", _layer_of(units[0]), start_ns, time.monotonic_ns(), size_bytes)

    def _wake_dispatch(self, units: Sequence[UnitId]) -> None:
        self._populated.update(units)
        self._progress.set()
        self._progress = trio.Event()

    async def _wait_populated(self, units: Sequence[UnitId]) -> bool:
        """Wait for the memory of units; False when it does not come any more."""
        while not (self._populated.issuperset(units) or self._allocated or self._stopped):
            await self._progress.wait()
        return self._populated.issuperset(units) and not self._stopped

    # Dispatch: a task for each path, so that a busy one does not hold the other back.

    async def _dispatch(self, path: Callable[[], Awaitable[None]]) -> None:
        try:
            await path()
        except MzdError as error:
            self.failure = self.failure or error
        self._dispatching -= 1
        self._receiving.cancel()  # the collector looks again whether anything is to come

    async def _read_layers(self) -> None:
        for layer in self.plan.layers:
            if self._stopped:
                return
            await self._read_layer(layer)
        if not self._stopped:
            await self._dispatch_head()

    async def _read_layer(self, layer: LayerRestore) -> None:
        if not await self._wait_populated(self._read_path(layer)):
            return
        if layer.weights_bytes:
            await self._send_read(self._weight_read(WeightUnit(layer.layer)))
        for batch in _batches(layer.read, BATCH_BYTES // self.plan.chunk_bytes):
            await self._send_read(self._chunk_read(layer.layer, batch))
        for batch in _batches(layer.read_decode, self._staged_chunks):
            await self._send_read(await self._payload_read(layer.layer, batch))

    async def _decode_layers(self) -> None:
        for layer in self.plan.layers:
            if self._stopped or not await self._wait_populated(self._decode_path(layer)):
                return
            self.cache.apply_row(layer.layer, layer.allocate, Event.ALLOCATE)
            self._take_leases(layer.layer, self._kv_units(layer.layer, layer.allocate))
            await self._announce_if_ready(layer.layer)
            for batch in _batches(layer.decode, BATCH_BYTES // self.plan.chunk_bytes):
                await self._send_decode(layer.layer, batch)

    async def _dispatch_head(self) -> None:
        if not self.plan.head_bytes:
            await self._announce_if_ready(HEAD)
        elif await self._wait_populated([HeadUnit()]):
            await self._send_read(self._weight_read(HeadUnit()))

    @property
    def _staged_chunks(self) -> int:
        """Payloads that one staging slot holds."""
        return self.parts.staging.slot_bytes // self.parts.units.kv_sizes.compressed_slot_bytes

    async def _send_read(self, read: ReadUnits) -> None:
        self._apply(read.layer, read.units, Event.RESTORE, Event.LOAD)
        self._in_flight += len(read.units)
        await self.ends.reads.send(read)

    async def _send_decode(self, layer: LayerIndex, chunks: Sequence[ChunkIndex]) -> None:
        units = self._kv_units(layer, chunks)
        payloads = np.array([self.cache.payloads[layer, chunk].address for chunk in chunks], np.uint64)
        self.cache.apply_row(layer, chunks, Event.RESTORE)
        self._in_flight += len(units)
        await self.ends.decodes.send(
            DecodeChunks(self.restore_id, layer, units, payloads, self._addresses(units))
        )

    def _apply(self, layer: int | None, units: Sequence[UnitId], kv_event: Event, event: Event) -> None:
        """Move a batch, which is of one layer and of one kind, along one arrow."""
        chunks = [unit.chunk for unit in units if isinstance(unit, KvUnit)]
        if chunks:
            assert layer is not None
            self.cache.apply_row(layer, chunks, kv_event)
        else:
            for unit in units:
                self.parts.units.apply(unit, event)

    def _kv_units(self, layer: LayerIndex, chunks: Sequence[ChunkIndex]) -> tuple[KvUnit, ...]:
        return tuple(KvUnit(self.cache.name, layer, chunk) for chunk in chunks)

    def _addresses(self, units: Sequence[UnitId]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.array([self._leases[unit].address for unit in units], np.uint64)

    def _weight_read(self, unit: WeightUnit | HeadUnit) -> ReadUnits:
        extent = self.parts.weights.extent(unit)
        sizes = np.array([extent.size_bytes], np.uint64)
        return ReadUnits(
            restore_id=self.restore_id,
            layer=unit.layer if isinstance(unit, WeightUnit) else HEAD,
            units=(unit,),
            fd=self.parts.weights.fd,
            offsets=np.array([extent.offset_bytes], np.uint64),
            addresses=self._addresses([unit]),
            sizes=sizes,
            crc_sizes=sizes,
            crc_seeds=np.zeros(1, np.uint32),
            crcs=np.array([extent.crc32c], np.uint32),
        )

    def _chunk_read(self, layer: LayerIndex, chunks: Sequence[ChunkIndex]) -> ReadUnits:
        units = self._kv_units(layer, chunks)
        return self._stored_read(layer, units, self._addresses(units))

    async def _payload_read(self, layer: LayerIndex, chunks: Sequence[ChunkIndex]) -> ReadUnits:
        """Payloads on flash pass through staging; they and it go on to the decompressor."""
        units = self._kv_units(layer, chunks)
        staging = await self.parts.staging.acquire()
        pitch = self.parts.units.kv_sizes.compressed_slot_bytes
        into = staging.address + pitch * np.arange(len(units), dtype=np.uint64)
        return self._stored_read(layer, units, into.astype(np.uint64), staging, self._addresses(units))

    def _stored_read(
        self,
        layer: LayerIndex,
        units: tuple[KvUnit, ...],
        into: np.ndarray[tuple[int], np.dtype[np.uint64]],
        staging: StagingBuffer | None = None,
        decode_addresses: np.ndarray[tuple[int], np.dtype[np.uint64]] | None = None,
    ) -> ReadUnits:
        stored = [self._located(unit) for unit in units]
        return ReadUnits(
            restore_id=self.restore_id,
            layer=layer,
            units=units,
            fd=stored[0].fd,
            offsets=np.array([chunk.offset_bytes for chunk in stored], np.uint64),
            addresses=into,
            sizes=np.array([chunk.size_bytes for chunk in stored], np.uint64),
            crc_sizes=np.array([chunk.payload_bytes for chunk in stored], np.uint64),
            crc_seeds=np.array([chunk.crc_seed for chunk in stored], np.uint32),
            crcs=np.array([chunk.crc for chunk in stored], np.uint32),
            holds=tuple(stored),
            staging=staging,
            decode_addresses=decode_addresses,
        )

    def _located(self, unit: KvUnit) -> StoredChunk:
        stored = self.parts.storage.locate(unit)
        if stored is None:
            raise RuntimeError(f"{unit} is stored, says the table, and the swap does not know it")
        return stored

    # Collection: the only task that takes facts.

    async def _collect(self) -> None:
        while self._dispatching or self._in_flight:
            fact: RestoreFact | None = None
            with trio.CancelScope() as self._receiving:
                fact = await self.ends.facts.receive()
            if fact is not None:
                await self._take(fact)

    async def _take(self, fact: RestoreFact) -> None:
        match fact:
            case UnitsRestored():
                self.trace.add(fact.lane, fact.layer, fact.start_ns, fact.end_ns, fact.size_bytes)
                self._deliver_all(fact.layer, fact.units)
            case UnitsFailed():
                self._deliver_all(fact.layer, fact.restored)
                self._lose_all(fact)
        await self._announce_if_ready(fact.layer)

    def _deliver_all(self, layer: int | None, units: Sequence[UnitId]) -> None:
        """These units hold their content: they are resident from here on."""
        self._in_flight -= len(units)
        decoded = [place for place in _places(units) if self.cache.state(place) is UnitState.DECODING]
        self._apply(layer, units, Event.RESTORE_DONE, Event.LOAD_DONE)
        self.spent_payloads += [self.cache.payloads.pop(place) for place in decoded]
        self._take_leases(layer, units)

    def _take_leases(self, layer: int | None, units: Sequence[UnitId]) -> None:
        self._outstanding[layer] -= len(units)
        for unit in units:
            lease = self._leases.pop(unit)
            if isinstance(unit, KvUnit):
                self.cache.leases[unit.layer, unit.chunk] = lease
            else:
                self.parts.units.whole(unit).lease = lease

    def _lose_all(self, fact: UnitsFailed) -> None:
        """A damaged chunk is lost, and the tokens from its first one on; they can be computed again."""
        self._in_flight -= len(fact.units)
        self.failure = self.failure or fact.error
        for unit in fact.units:
            if isinstance(unit, KvUnit):
                self.parts.units.apply(unit, Event.LOST)
                self._lost_chunk = min(
                    unit.chunk, self._lost_chunk if self._lost_chunk is not None else unit.chunk
                )
            else:
                self.parts.units.apply(unit, Event.LOAD_FAILED)

    # Readiness.

    async def _announce_if_ready(self, layer: int | None) -> None:
        if not self.announce or self._outstanding[layer] or self._stopped:
            return
        event = self._head_ready() if layer is None else self._layer_ready(LayerIndex(layer))
        now_ns = time.monotonic_ns()
        self.trace.add("ready", layer, now_ns, now_ns, 0)
        self._outstanding[layer] = -1  # announced: nothing is outstanding, and it must not be said twice
        if self.parts.overlap.prefills_ahead:
            await self.ends.readiness.send(event)
        else:
            self._held_back.append(event)

    def _layer_ready(self, layer: LayerIndex) -> LayerReady:
        lease = self.parts.units.weights[layer].lease
        assert lease is not None
        return LayerReady(self.restore_id, layer, lease.address, self.cache.chunk_addresses(layer))

    def _head_ready(self) -> HeadReady:
        lease = self.parts.units.head.lease
        assert lease is not None
        return HeadReady(self.restore_id, lease.address)

    # The end.

    def _settle(self) -> None:
        """Give back what was reserved for units that did not come."""
        self.parts.memory.release(list(self._leases.values()))
        self._leases.clear()
        self.parts.staging.trim()

    async def _conclude(self) -> None:
        error = self._error()
        if error is None:
            for event in self._held_back:
                await self.ends.readiness.send(event)
            return
        if self.announce:
            await self.ends.readiness.send(RestoreFailed(self.restore_id, error))
        raise error

    def _error(self) -> MzdError | None:
        if self._lost_chunk is not None and self.failure is not None:
            keep_tokens = self._lost_chunk * CHUNK_TOKENS
            return MzdError("corrupt_chunk", self.failure.message, keep_tokens=keep_tokens)
        if self.failure is None and self.abandoned:
            return MzdError("cancelled", "the restore was abandoned")
        return self.failure


def _places(units: Sequence[UnitId]) -> list[Place]:
    return [(unit.layer, unit.chunk) for unit in units if isinstance(unit, KvUnit)]


def _batches(chunks: Sequence[ChunkIndex], count: int) -> Iterator[Sequence[ChunkIndex]]:
    """Cut into pieces of `count`, or of one chunk where not even that fits."""
    for start in range(0, len(chunks), max(1, count)):
        yield chunks[start : start + max(1, count)]


def _layer_of(unit: UnitId) -> int | None:
    return HEAD if isinstance(unit, HeadUnit) else unit.layer
