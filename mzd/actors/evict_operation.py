"""Owns one eviction from plan to last unit; memory falls with every step of it.

A part of the allocator actor: it runs in the allocator's task and changes the allocator's table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import Any, TypeVar

import numpy as np
import trio

from mzd.codec import Codec
from mzd.errors import MzdError
from mzd.memory.backend import Lease, MemoryBackend
from mzd.memory.in_memory_swap import InMemorySwap
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import NewChunk, SlotWrite
from mzd.memory.unit_table import KvCache, Place, UnitTable
from mzd.memory.workers import Workers
from mzd.messages.evict_path import (
    ChunksCompressed,
    ChunksWritten,
    CompressChunks,
    EvictFact,
    EvictOutcome,
    WriteChunks,
)
from mzd.policy.eviction_planner import Destination, EvictionPlan, Step
from mzd.policy.residency import Event, UnitState
from mzd.policy.snapshot import CopyKind
from mzd.policy.units import HUGE_PAGE_BYTES, HeadUnit, KvUnit, UnitId

T = TypeVar("T")

WINDOW_BYTES = 32 * 1024 * 1024
"""Units in work at once: enough to keep every thread busy, few enough that each window soon frees memory."""


Pending = dict[int, Callable[[Any], Awaitable[list[Lease]]]]
"""By batch: what to do when its fact comes; returns the leases that are free then."""


@dataclass(slots=True)
class EvictEnds:
    """The channel ends that an eviction uses; the allocator owns them."""

    compressions: trio.MemorySendChannel[CompressChunks]
    writes: trio.MemorySendChannel[WriteChunks]
    facts: trio.MemoryReceiveChannel[EvictFact]


@dataclass(slots=True)
class EvictParts:
    """What an eviction works on; all of it is the allocator's."""

    units: UnitTable
    memory: MemoryBackend
    payloads: InMemorySwap
    storage: StorageSwap
    codec: Codec
    workers: Workers
    compress_threads: int


@dataclass(slots=True)
class EvictOperation:
    """One eviction. `run` may be called once.

    Bad luck (no space on flash, no memory for a payload, a chunk that the codec refuses) sends the rest
    another way: `plan` is asked again with the table as it then is and without the ways that have failed,
    until the goal is met or a round frees nothing.
    """

    goal_bytes: int
    plan: Callable[[int, Set[Destination]], EvictionPlan]
    parts: EvictParts
    ends: EvictEnds
    freed_bytes: int = 0
    exhausted: bool = False
    warnings: list[str] = field(default_factory=list)
    done: list[Step] = field(default_factory=list)
    failed: set[Destination] = field(default_factory=set)
    _batch_ids: Iterator[int] = field(default_factory=count)

    async def run(self) -> None:
        """Carry the plan out, and what has to take its place."""
        while self.freed_bytes < self.goal_bytes:
            before, num_failed = self.freed_bytes, len(self.failed)
            plan = self.plan(self.goal_bytes - self.freed_bytes, self.failed)
            if Destination.FLASH not in self.failed:  # else the reason has been given, and may be another
                self._warn(plan.warnings)
            noted = len(self.done)
            for window in _windows(plan.steps, self.parts.units.kv_sizes.chunk_bytes):
                await self._carry_out(window)
            self.done[noted:] = _in_order(self.done[noted:], plan.steps)
            if len(self.failed) > num_failed:
                continue  # what this plan could not do may go the other way
            if plan.exhausted or self.freed_bytes == before:
                self.exhausted = plan.exhausted or not plan.steps
                return

    def outcome(self, resident_bytes: int) -> EvictOutcome:
        """The answer, after `run`."""
        return EvictOutcome(
            requested_bytes=self.goal_bytes,
            freed_bytes=self.freed_bytes,
            resident_bytes=resident_bytes,
            exhausted=self.exhausted,
            warnings=tuple(self.warnings),
            steps=tuple(step_as_map(step) for step in self.done),
        )

    def _warn(self, warnings: Sequence[str]) -> None:
        self.warnings += [warning for warning in warnings if warning not in self.warnings]

    async def _carry_out(self, window: Sequence[Step]) -> None:
        """What only needs letting go first, since it makes room; then both ways out side by side."""
        await self._let_go([step for step in window if step.to is Destination.DROPPED])
        pending: Pending = {}
        await self._send_compressions([step for step in window if step.to is Destination.RAM], pending)
        await self._send_writes([step for step in window if step.to is Destination.FLASH], pending)
        while pending:
            await self._take_fact(pending)

    async def _take_fact(self, pending: Pending) -> None:
        fact = await self.ends.facts.receive()
        leases = await pending.pop(fact.batch_id)(fact)
        await self.parts.workers.run(self.parts.memory.release, leases)

    async def _send(self, channel: trio.MemorySendChannel[T], message: T, pending: Pending) -> None:
        """Send; while the channel is full take facts: whoever should empty it may wait to be rid of one."""
        while True:
            try:
                return channel.send_nowait(message)
            except trio.WouldBlock:
                await self._take_fact(pending)

    def _note(self, step: Step) -> None:
        self.done.append(step)
        self.freed_bytes += step.freed_bytes

    def _as_it_was(self, step: Step, left: Sequence[Lease]) -> Step:
        """A chunk whose payload was planned and could not be made leaves whole: that frees more."""
        return step._replace(freed_bytes=self.parts.units.kv_sizes.chunk_bytes) if left else step

    # Let go.

    async def _let_go(self, steps: Sequence[Step]) -> None:
        leases: list[Lease] = []
        for step in steps:
            if isinstance(step.unit, KvUnit):
                left = self._drop_chunk(step.unit)
                self._note(self._as_it_was(step, left))
                leases += left
            else:
                unit = self.parts.units.whole(step.unit)
                unit.apply(Event.DROP)
                leases.append(unit.take_lease())
                self._note(step)
        if leases:
            await self.parts.workers.run(self.parts.memory.release, leases)

    def _drop_chunk(self, unit: KvUnit) -> list[Lease]:
        """Flash holds the content: let go of the buffer, or of the payload in RAM."""
        cache, place = self._where(unit)
        raw = cache.copies[place] == CopyKind.STORED
        was_compressed = cache.state(place) is UnitState.COMPRESSED
        cache.apply(place, Event.DROP_TO_STORED if raw else Event.DROP_TO_STORED_COMPRESSED)
        if was_compressed:
            self.parts.payloads.release(cache.payloads.pop(place))
            return []
        return [cache.leases.pop(place)]

    def _where(self, unit: KvUnit) -> tuple[KvCache, Place]:
        return self.parts.units.caches[unit.context], (unit.layer, unit.chunk)

    # To RAM.

    async def _send_compressions(self, steps: Sequence[Step], pending: Pending) -> None:
        steps = self._push_payloads(steps)
        share = -(-len(steps) // self.parts.compress_threads)
        for start in range(0, len(steps), max(1, share)):
            batch = steps[start : start + share]
            message = self._compression(batch)
            pending[message.batch_id] = partial(self._compressed, batch)
            await self._send(self.ends.compressions, message, pending)

    @property
    def _may_use_huge_pages(self) -> bool:
        """Memory must fall at every step: 2 MiB at once are no growth when more has been freed already."""
        return self.freed_bytes >= HUGE_PAGE_BYTES and self.parts.memory.statistics().huge_pages

    def _push_payloads(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Start compressing, as far as there is memory for payloads; the steps that have begun."""
        payload_bytes = self.parts.codec.payload_bytes(self.parts.units.kv_sizes.chunk_bytes)
        for i, unit in enumerate(_kv_units(steps)):
            cache, place = self._where(unit)
            try:
                slot = self.parts.payloads.push(payload_bytes, huge=self._may_use_huge_pages)
            except MzdError as error:
                self._way_failed(Destination.RAM, error)
                return steps[:i]
            cache.apply(place, Event.COMPRESS)
            cache.payloads[place] = slot
        return steps

    def _compression(self, steps: Sequence[Step]) -> CompressChunks:
        where = [self._where(unit) for unit in _kv_units(steps)]
        return CompressChunks(
            next(self._batch_ids),
            np.array([cache.leases[place].address for cache, place in where], np.uint64),
            np.array([cache.payloads[place].address for cache, place in where], np.uint64),
            self.parts.units.kv_sizes.chunk_bytes,
        )

    async def _compressed(self, steps: Sequence[Step], fact: ChunksCompressed) -> list[Lease]:
        leases = []
        for step, unit, encoded in zip(steps, _kv_units(steps), fact.encoded, strict=True):
            cache, place = self._where(unit)
            if encoded:
                cache.apply(place, Event.COMPRESS_DONE)
                leases.append(cache.leases.pop(place))
                self._note(step)
            else:
                cache.apply(place, Event.COMPRESS_FAILED)
                cache.incompressible[place] = True
                self.parts.payloads.release(cache.payloads.pop(place))
        return leases

    # To flash.

    async def _send_writes(self, steps: Sequence[Step], pending: Pending) -> None:
        for _, group in groupby(steps, key=lambda step: _kv_units([step])[0].context):
            batch = list(group)
            writes = await self._allocate_slots(batch)
            if writes is None:
                return
            addresses = tuple(self._start_write(unit) for unit in _kv_units(batch))
            message = WriteChunks(next(self._batch_ids), addresses, tuple(writes))
            pending[message.batch_id] = partial(self._written, batch, writes)
            await self._send(self.ends.writes, message, pending)

    async def _allocate_slots(self, steps: Sequence[Step]) -> list[SlotWrite] | None:
        if Destination.FLASH in self.failed:
            return None
        try:
            chunks = [self._new_chunk(unit) for unit in _kv_units(steps)]
            return await self.parts.workers.run(self.parts.storage.allocate, chunks)
        except MzdError as error:
            self._way_failed(Destination.FLASH, error)
            return None

    def _new_chunk(self, unit: KvUnit) -> NewChunk:
        cache, place = self._where(unit)
        sizes = self.parts.units.kv_sizes
        compressed = cache.state(place) is UnitState.COMPRESSED
        codec = self.parts.codec
        return NewChunk(
            unit=unit,
            num_tokens=cache.tokens_in(unit.chunk),
            tokens_hash=cache.prefix_hash(unit.chunk),
            codec_name=codec.name if compressed else "none",
            codec_version=codec.version if compressed else 1,
            payload_bytes=codec.payload_bytes(sizes.chunk_bytes) if compressed else sizes.chunk_bytes,
            slot_bytes=sizes.compressed_slot_bytes if compressed else sizes.slot_bytes,
        )

    def _start_write(self, unit: KvUnit) -> int:
        cache, place = self._where(unit)
        if cache.state(place) is UnitState.COMPRESSED:
            cache.apply(place, Event.SPILL)
            return cache.payloads[place].address
        cache.apply(place, Event.WRITE)
        return cache.leases[place].address

    async def _written(
        self, steps: Sequence[Step], writes: Sequence[SlotWrite], fact: ChunksWritten
    ) -> list[Lease]:
        errors = await self.parts.workers.run(self._commit, writes, fact)
        leases = []
        for step, unit, error in zip(steps, _kv_units(steps), errors, strict=True):
            if error is None:
                left = self._left_ram(unit)
                self._note(self._as_it_was(step, left))
                leases += left
            else:
                cache, place = self._where(unit)
                spilling = cache.state(place) is UnitState.SPILLING
                cache.apply(place, Event.SPILL_FAILED if spilling else Event.WRITE_FAILED)
                self._way_failed(Destination.FLASH, error)
        return leases

    def _commit(self, writes: Sequence[SlotWrite], fact: ChunksWritten) -> list[MzdError | None]:
        """Record what was written; what cannot be recorded was not written. Runs in a thread."""
        good = [i for i, error in enumerate(fact.errors) if error is None]
        self.parts.storage.cancel([writes[i] for i, error in enumerate(fact.errors) if error is not None])
        try:
            self.parts.storage.commit([(writes[i], fact.crcs[i]) for i in good])
        except MzdError as error:
            self.parts.storage.cancel([writes[i] for i in good])
            return [error for _ in writes]
        return list(fact.errors)

    def _left_ram(self, unit: KvUnit) -> list[Lease]:
        cache, place = self._where(unit)
        if cache.state(place) is UnitState.SPILLING:
            cache.apply(place, Event.SPILL_DONE)
            cache.copies[place] = CopyKind.STORED_COMPRESSED
            self.parts.payloads.release(cache.payloads.pop(place))
            return []
        cache.apply(place, Event.WRITE_DONE)
        cache.copies[place] = CopyKind.STORED
        return [cache.leases.pop(place)]

    def _way_failed(self, way: Destination, error: MzdError) -> None:
        """Eviction goes on without flash, or without RAM, and frees what the other alone allows."""
        self.failed.add(way)
        self._warn([error.code])


def _windows(steps: Sequence[Step], chunk_bytes: int) -> Iterator[list[Step]]:
    """Cut a plan into windows; a unit that leaves twice (to RAM, then to flash) never does so in one."""
    count_max = max(1, WINDOW_BYTES // chunk_bytes)
    window: list[Step] = []
    units: set[UnitId] = set()
    for step in steps:
        if len(window) >= count_max or step.unit in units:
            yield window
            window, units = [], set()
        window.append(step)
        units.add(step.unit)
    if window:
        yield window


def _in_order(done: Sequence[Step], planned: Sequence[Step]) -> list[Step]:
    """What was done, as it was planned: the two ways out finish in an order of their own."""
    places = {(step.unit, step.to): place for place, step in enumerate(planned)}
    return sorted(done, key=lambda step: places[step.unit, step.to])


def _kv_units(steps: Sequence[Step]) -> list[KvUnit]:
    return [step.unit for step in steps if isinstance(step.unit, KvUnit)]


def step_as_map(step: Step) -> dict[str, Any]:
    """One step as the RPC shows it."""
    where: dict[str, Any]
    if isinstance(step.unit, KvUnit):
        unit = step.unit
        where = {"unit": "kv", "layer": unit.layer, "chunk": unit.chunk, "context": unit.context}
    elif isinstance(step.unit, HeadUnit):
        where = {"unit": "head", "layer": None}
    else:
        where = {"unit": "weights", "layer": step.unit.layer}
    return {"stage": step.stage.value, **where, "to": step.to.value, "bytes": step.freed_bytes}
