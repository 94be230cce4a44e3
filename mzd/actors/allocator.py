"""Owns residency: the only actor that changes which unit is where."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import numpy as np
import trio

from mzd import native
from mzd.actors.evict_operation import EvictEnds, EvictOperation, EvictParts, step_as_map
from mzd.actors.restore_operation import RestoreEnds, RestoreOperation, RestoreParts
from mzd.errors import MzdError
from mzd.memory.restore_trace import RestoreTrace
from mzd.memory.unit_table import KvCache, UnitTable, chunks_of
from mzd.messages.evict_path import DropContext, Evict, EvictOutcome
from mzd.messages.pressure import EvictForPressure
from mzd.messages.restore_path import AbandonRestore, FinishUse, RestoreContext, RestoreOutcome
from mzd.policy.eviction_planner import EvictionPlan, Order, plan_eviction
from mzd.policy.profile import UnitTimes
from mzd.policy.restore_planner import RestorePlan, intact_tokens, plan_restore
from mzd.policy.snapshot import MemorySnapshot
from mzd.policy.units import CHUNK_TOKENS, ChunkIndex, KvUnit, LayerIndex

log = logging.getLogger(__name__)

AllocatorMessage = RestoreContext | AbandonRestore | FinishUse | Evict | DropContext
Operation = RestoreContext | Evict | DropContext

MEMORY_POLL_S = 0.05
"""How often a restore that waits for memory looks again."""


@dataclass(slots=True)
class AllocatorSettings:
    """What the configuration decides about residency."""

    restore_wait_s: float
    floor_bytes: int
    eviction_order: Order
    times: UnitTimes


@dataclass(slots=True)
class Allocator:
    """Both paths begin here. One operation (a restore, an eviction, a drop) runs at a time, in order of arrival.

    The inbox loop never awaits a send: it queues operations and does at once what only changes the table. A
    second task carries operations out and sends. An eviction that comes while a request runs takes what
    the request does not need (units in use are protected) and says so.

    Cancelled: the batches in flight end in their own actors; every outgoing channel is closed.
    """

    inbox: trio.MemoryReceiveChannel[AllocatorMessage]
    pressure: trio.MemoryReceiveChannel[EvictForPressure]
    restore_parts: RestoreParts
    restore_ends: RestoreEnds
    evict_parts: EvictParts
    evict_ends: EvictEnds
    settings: AllocatorSettings
    available_bytes: Callable[[], int | None]
    last_trace: RestoreTrace | None = None
    state: str = "idle"
    _queue: deque[Operation | EvictForPressure] = field(default_factory=deque)
    _arrived: trio.Event = field(default_factory=trio.Event)
    _running: RestoreOperation | None = None
    _abandoned: set[int] = field(default_factory=set)
    _seeds: count[int] = field(default_factory=count)

    @property
    def units(self) -> UnitTable:
        """The table; everybody else may only read it."""
        return self.restore_parts.units

    def snapshot(self, *, storage_failed: bool = False) -> MemorySnapshot:
        """All units now."""
        storage = self.restore_parts.storage.statistics()
        left = 0 if storage_failed else max(0, storage.quota_bytes - storage.swap_bytes)
        return self.units.snapshot(left)

    async def run(self) -> None:
        """Serve until the inbox closes."""
        async with self._outgoing(), trio.open_nursery() as nursery:
            nursery.start_soon(self._operate)
            nursery.start_soon(self._listen_to_pressure)
            async with self.inbox:
                async for message in self.inbox:
                    self._take(message)
            nursery.cancel_scope.cancel()

    def _outgoing(self) -> _Closing:
        ends = self.restore_ends
        evict = self.evict_ends
        return _Closing((ends.reads, ends.decodes, ends.readiness, evict.compressions, evict.writes))

    async def _listen_to_pressure(self) -> None:
        async with self.pressure:
            async for message in self.pressure:
                self._enqueue(message)

    def _enqueue(self, operation: Operation | EvictForPressure) -> None:
        self._queue.append(operation)
        self._arrived.set()

    def _take(self, message: AllocatorMessage) -> None:
        match message:
            case AbandonRestore():
                self._abandon(message.restore_id)
            case FinishUse():
                self._finish_use(message)
            case _:
                self._enqueue(message)

    def _abandon(self, restore_id: int) -> None:
        if self._running is not None and self._running.restore_id == restore_id:
            self._running.abandoned = True
        elif any(isinstance(m, RestoreContext) and m.restore_id == restore_id for m in self._queue):
            self._abandoned.add(restore_id)

    def _finish_use(self, message: FinishUse) -> None:
        """Take the ids whose KV is computed; chunks behind them hold nothing that counts.

        A restore of this context that still runs settles first: its operation is not over before.
        """
        cache = self.units.caches.get(message.context)
        if cache is None:
            return
        if self._running is not None and self._running.cache is cache:
            self._running.then = partial(self._finish_use, message)
            return
        cache.in_use = False
        cache.last_used_s = trio.current_time()
        self._cut(cache, chunks_of(min(len(message.tokens), self._intact(cache))))
        cache.set_tokens(message.tokens[: cache.num_chunks * CHUNK_TOKENS])

    def _intact(self, cache: KvCache) -> int:
        return intact_tokens(cache.snapshot(), cache.num_chunks * CHUNK_TOKENS)

    def _cut(self, cache: KvCache, num_chunks: int) -> None:
        """Forget chunks from `num_chunks` on, wherever they lie."""
        on_flash = np.argwhere(cache.copies[:, num_chunks:] != 0)
        leases, slots = cache.cut(num_chunks)
        self.restore_parts.memory.release(leases)
        for slot in reversed(slots):
            self.restore_parts.payloads.release(slot)
        self.restore_parts.storage.free(
            KvUnit(cache.name, LayerIndex(int(layer)), ChunkIndex(int(chunk) + num_chunks))
            for layer, chunk in on_flash
        )

    async def _operate(self) -> None:
        while True:
            while not self._queue:
                self.state = "idle"
                self._arrived = trio.Event()
                await self._arrived.wait()
            operation = self._queue.popleft()
            match operation:
                case RestoreContext():
                    self.state = "restoring"
                    await self._restore(operation)
                case Evict():
                    self.state = "evicting"
                    operation.reply.set(await self._evict(operation))
                case EvictForPressure():
                    self.state = "evicting"
                    await self._evict_for_pressure(operation)
                case DropContext():
                    operation.reply.set(self._drop(operation.context))

    # Restore.

    async def _restore(self, message: RestoreContext) -> None:
        start_s = time.monotonic()
        cache = self.units.cache(message.context)
        cache.in_use = True
        try:
            plan = self._plan_restore(cache, message)
            message.replies.planned.set(_restored_bytes(plan))
            trace = await self._run_restore(cache, message, plan)
        except MzdError as error:
            message.replies.planned.set_if_open(0)
            message.replies.outcome.fail(error)
            return
        elapsed_s = time.monotonic() - start_s
        if trace.spans:
            self.last_trace = trace
        message.replies.outcome.set(RestoreOutcome(message.restore_id, _restored_bytes(plan), elapsed_s))

    def _plan_restore(self, cache: KvCache, message: RestoreContext) -> RestorePlan:
        """Forget what the request does not share, make the columns for what it adds, and plan."""
        self._cut(cache, chunks_of(message.keep_tokens))
        if message.capacity_tokens > message.keep_tokens:
            self._void_copies(cache, message.keep_tokens // CHUNK_TOKENS)
        plan = plan_restore(
            self.snapshot(),
            cache.name,
            keep_tokens=message.keep_tokens,
            capacity_tokens=message.capacity_tokens,
            need_head=True,
        )
        cache.grow(chunks_of(message.capacity_tokens))
        return plan

    async def _run_restore(
        self, cache: KvCache, message: RestoreContext, plan: RestorePlan
    ) -> RestoreTrace:
        trace = RestoreTrace(message.restore_id)
        operation = RestoreOperation(
            restore_id=message.restore_id,
            cache=cache,
            plan=plan,
            parts=self.restore_parts,
            ends=self.restore_ends,
            announce=message.announce,
            trace=trace,
            abandoned=message.restore_id in self._abandoned,
        )
        self._abandoned.discard(message.restore_id)
        self._running = operation
        try:
            await self._wait_for_memory(operation, plan.allocate_bytes)
            await operation.run()
        finally:
            self._running = None
            self._cut(cache, chunks_of(self._intact(cache)))
            if operation.then is not None:
                operation.then()
        return trace

    def _void_copies(self, cache: KvCache, first_chunk: int) -> None:
        """New tokens go into this chunk: what flash holds of it is not its content for long."""
        cache.dirty(first_chunk)

    async def _wait_for_memory(self, operation: RestoreOperation, needed_bytes: int) -> None:
        """Wait for room above the floor; give up with the figures and keep what there is.

        Raises:
            MzdError: `insufficient_memory`.
        """
        deadline_s = time.monotonic() + self.settings.restore_wait_s
        while needed_bytes and not operation.abandoned:
            available = self.available_bytes()
            if available is None or available >= needed_bytes + self.settings.floor_bytes:
                return
            if time.monotonic() >= deadline_s:
                error = MzdError(
                    "insufficient_memory",
                    f"{needed_bytes} bytes are needed above a floor of {self.settings.floor_bytes}; "
                    f"{available} are available",
                    needed_bytes=needed_bytes,
                    available_bytes=available,
                    floor_bytes=self.settings.floor_bytes,
                )
                operation.failure = error
                return
            await trio.sleep(MEMORY_POLL_S)

    # Evict.

    async def _evict(self, message: Evict) -> EvictOutcome:
        if message.dry_run:
            return self._dry_run(message)
        return await self._carry_out(message.goal_bytes, message.context, message.reason)

    async def _evict_for_pressure(self, message: EvictForPressure) -> None:
        await self._carry_out(message.evict_bytes, None, message.reason)

    async def _carry_out(self, goal_bytes: int, context: str | None, reason: str) -> EvictOutcome:
        start_s = time.monotonic()
        operation = EvictOperation(
            goal_bytes, partial(self._plan_eviction, context), self.evict_parts, self.evict_ends
        )
        if self.units.in_use:
            operation.warnings.append("in_use")
        try:
            await operation.run()
        except MzdError as error:  # no memory even for one payload: say what was freed until then
            operation.warnings.append(error.code)
        await self.evict_parts.workers.run(native.trim_heap)
        outcome = operation.outcome(self.resident_bytes())
        log.info(
            "evicted: reason=%s requested_bytes=%d freed_bytes=%d exhausted=%s warnings=%s seconds=%.3f",
            reason,
            goal_bytes,
            outcome.freed_bytes,
            outcome.exhausted,
            ",".join(outcome.warnings),
            time.monotonic() - start_s,
        )
        return outcome

    def _plan_eviction(self, context: str | None, goal_bytes: int, storage_failed: bool) -> EvictionPlan:
        snapshot = self.snapshot(storage_failed=storage_failed)
        if context is not None:
            snapshot = snapshot.limited_to(context)
        return plan_eviction(
            snapshot, goal_bytes, self.settings.times, order=self.settings.eviction_order
        )

    def _dry_run(self, message: Evict) -> EvictOutcome:
        plan = self._plan_eviction(message.context, message.goal_bytes, False)
        return EvictOutcome(
            requested_bytes=message.goal_bytes,
            freed_bytes=plan.freed_bytes,
            resident_bytes=self.resident_bytes() - plan.freed_bytes,
            exhausted=plan.exhausted,
            warnings=plan.warnings,
            steps=tuple(step_as_map(step) for step in plan.steps),
        )

    def resident_bytes(self) -> int:
        """Model memory in RAM: units and compressed chunks."""
        return self.units.resident_bytes() + self.restore_parts.payloads.statistics().resident_bytes

    def _drop(self, context: str) -> bool:
        cache = self.units.caches.get(context)
        if cache is None:
            return False
        self._cut(cache, 0)
        del self.units.caches[context]
        return True


def _restored_bytes(plan: RestorePlan) -> int:
    """What a plan brings back; room for tokens to come is not restored."""
    chunks = sum(len(layer.chunks) - len(layer.allocate) for layer in plan.layers)
    weights = sum(layer.weights_bytes for layer in plan.layers)
    return weights + plan.head_bytes + chunks * plan.chunk_bytes


@dataclass(slots=True)
class _Closing:
    """Closes every given channel at the end of the block."""

    channels: tuple[trio.MemorySendChannel[object], ...]

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *exc_info: object) -> None:
        for channel in self.channels:
            channel.close()
