"""Owns residency: the only actor that changes which unit is where."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import trio
from numpy.typing import NDArray

from mzd import native
from mzd.actors.evict_operation import EvictEnds, EvictOperation, EvictParts, step_as_map
from mzd.actors.restore_operation import RestoreEnds, RestoreOperation, RestoreParts
from mzd.errors import MzdError
from mzd.memory.backend import Lease
from mzd.memory.baseline import Baseline
from mzd.memory.in_memory_swap import DetachedPages, free_pages
from mzd.memory.restore_trace import RestoreTrace
from mzd.memory.unit_table import KvCache, UnitTable, chunks_of
from mzd.messages.evict_path import DropContext, Evict, EvictOutcome
from mzd.messages.restore_path import (
    AbandonRestore,
    FinishUse,
    RestoreContext,
    RestoreFailed,
    RestoreOutcome,
)
from mzd.policy.eviction_planner import Destination, EvictionPlan, Order, plan_eviction
from mzd.policy.pressure import MemoryRoom
from mzd.policy.profile import UnitTimes
from mzd.policy.residency import UnitState
from mzd.policy.restore_planner import RestorePlan, intact_tokens, plan_restore
from mzd.policy.snapshot import CopyKind, MemorySnapshot
from mzd.policy.units import CHUNK_TOKENS, KvUnit

log = logging.getLogger(__name__)

AllocatorMessage = RestoreContext | AbandonRestore | FinishUse | Evict | DropContext
Operation = RestoreContext | Evict | DropContext


def _nobody_looks() -> None:
    """Without a pressure monitor nobody needs to know."""


TRACES_KEPT = 16
"""Restores that can still be shown: each leaves some hundred spans, all of them together under 1 MB."""

MEMORY_POLL_S = 0.05
"""How often a restore that waits for memory looks again."""


@dataclass(frozen=True, slots=True)
class _Garbage:
    """What nobody refers to any more: leases, copies on flash, pages of the in-memory swap."""

    leases: Sequence[Lease] = ()
    units: Sequence[KvUnit] = ()
    pages: DetachedPages | None = None


@dataclass(slots=True)
class AllocatorSettings:
    """What the configuration decides about residency."""

    restore_wait_s: float
    eviction_order: Order
    times: UnitTimes


@dataclass(slots=True)
class Allocator:
    """Both paths begin here. One operation (restore, eviction, drop) runs at a time, in order of arrival.

    The inbox loop never awaits a send: it queues operations and does at once what only changes the table. A
    second task carries operations out and sends. An eviction that comes while a request runs takes what
    the request does not need (units in use are protected) and says so.

    Cancelled: the batches in flight end in their own actors; every outgoing channel is closed.
    """

    inbox: trio.MemoryReceiveChannel[AllocatorMessage]
    restore_parts: RestoreParts
    restore_ends: RestoreEnds
    evict_parts: EvictParts
    evict_ends: EvictEnds
    settings: AllocatorSettings
    room: Callable[[], MemoryRoom | None]
    baseline: Baseline
    became_evictable: Callable[[], None] = _nobody_looks
    traces: deque[RestoreTrace] = field(default_factory=lambda: deque(maxlen=TRACES_KEPT))
    state: str = "idle"
    _queue: deque[Operation] = field(default_factory=deque)
    _arrived: trio.Event = field(default_factory=trio.Event)
    _running: RestoreOperation | None = None
    _abandoned: set[int] = field(default_factory=set)
    _garbage: list[_Garbage] = field(default_factory=list)

    @property
    def last_trace(self) -> RestoreTrace | None:
        """The newest restore on record."""
        return self.traces[-1] if self.traces else None

    @property
    def units(self) -> UnitTable:
        """The table; everybody else may only read it."""
        return self.restore_parts.units

    def snapshot(self, failed: Set[Destination] = frozenset()) -> MemorySnapshot:
        """All units now; ways out that have `failed` are shown as closed."""
        storage = self.restore_parts.storage.statistics()
        left = 0 if Destination.FLASH in failed else max(0, storage.quota_bytes - storage.swap_bytes)
        snapshot = self.units.snapshot(left)
        return snapshot.without_compression() if Destination.RAM in failed else snapshot

    async def run(self) -> None:
        """Serve until the inbox closes."""
        with self._outgoing():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._operate)
                async with self.inbox:
                    async for message in self.inbox:
                        self._take(message)
                nursery.cancel_scope.cancel()

    def _outgoing(self) -> ExitStack:
        """Closes every outgoing channel at the end, so that the other actors see it and end too."""
        restore, evict = self.restore_ends, self.evict_ends
        stack = ExitStack()
        for channel in (restore.reads, restore.decodes, restore.readiness, evict.compressions, evict.writes):
            stack.enter_context(channel)
        return stack

    def _enqueue(self, operation: Operation) -> None:
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
        """Take the ids whose KV is computed; chunks behind them hold nothing that counts."""
        self._withdraw_queued(message.context)
        cache = self.units.caches.get(message.context)
        if cache is None:
            return
        if self._running is not None and self._running.cache is cache:
            # Nobody waits for this restore any more, but its units must settle first.
            self._running.abandoned = True
            self._running.afterwards = partial(self._finish_use, message)
            return
        if not cache.in_use:
            return  # its restore never began: all is as it was, and an eviction may be at work on it
        cache.in_use = False
        cache.last_used_s = trio.current_time()
        self._cut(cache, chunks_of(min(len(message.tokens), self._intact(cache))))
        self._retag(cache, message.tokens[: cache.num_chunks * CHUNK_TOKENS])
        if not len(cache.tokens):
            del self.units.caches[cache.name]
        self.became_evictable()

    def _withdraw_queued(self, context: str) -> None:
        """A restore that has not begun when its request ends must not begin: it would protect for ever."""
        for message in [m for m in self._queue if isinstance(m, RestoreContext) and m.context == context]:
            self._queue.remove(message)
            error = MzdError("cancelled", "the restore was abandoned")
            message.replies.planned.fail(error)
            message.replies.outcome.fail(error)

    def _retag(self, cache: KvCache, tokens: NDArray[np.uint32]) -> None:
        """Note the tokens; where a chunk that was in use holds others than before, flash has an old copy."""
        before = cache.hashes
        cache.set_tokens(tokens)
        changed = [i for i, (old, new) in enumerate(zip(before, cache.hashes, strict=False)) if old != new]
        for chunk in changed:
            stale = np.flatnonzero(
                (cache.states[:, chunk] == UnitState.RESIDENT) & (cache.copies[:, chunk] != 0)
            )
            cache.copies[stale, chunk] = CopyKind.NONE
            cache.incompressible[:, chunk] = False
            self._discard(_Garbage(units=[cache.unit((int(layer), chunk)) for layer in stale]))

    def _intact(self, cache: KvCache) -> int:
        return intact_tokens(cache.snapshot(), cache.num_chunks * CHUNK_TOKENS)

    def _cut(self, cache: KvCache, num_chunks: int) -> None:
        """Forget chunks from `num_chunks` on, wherever they lie."""
        if num_chunks >= cache.num_chunks:
            return
        on_flash = np.argwhere(cache.copies[:, num_chunks:] != 0)
        units = [cache.unit((int(layer), int(chunk) + num_chunks)) for layer, chunk in on_flash]
        leases, slots = cache.cut(num_chunks)
        pages = self.restore_parts.payloads.detach(reversed(slots))
        self._discard(_Garbage(leases=leases, units=units, pages=pages))

    def _discard(self, garbage: _Garbage) -> None:
        """Leave memory and slots that nobody refers to any more to the operating task: it may wait."""
        self._garbage.append(garbage)
        self._arrived.set()

    async def _collect_garbage(self) -> None:
        while self._garbage:
            await self.evict_parts.workers.run(self._give_back, self._garbage.pop())

    def _give_back(self, garbage: _Garbage) -> None:
        """Runs in a thread."""
        self.restore_parts.memory.release(garbage.leases)
        if garbage.pages is not None:
            free_pages(garbage.pages)
        try:
            self.restore_parts.storage.free(garbage.units)
        except MzdError as error:  # the copies stay and are harmless: their hash fits no tokens
            log.warning("stale copies stay on flash: %s", error)

    async def _operate(self) -> None:
        while True:
            await self._collect_garbage()
            if not self._queue:
                self.state = "idle"
                self._arrived = trio.Event()
                await self._arrived.wait()
                continue
            await self._perform(self._queue.popleft())

    async def _perform(self, operation: Operation) -> None:
        match operation:
            case RestoreContext():
                self.state = "restoring"
                await self._restore(operation)
            case Evict():
                self.state = "evicting"
                operation.reply.set(await self._evict(operation))
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
            log.warning("restore: context=%s %s", message.context, error)
            if not message.replies.planned.is_settled:
                await self._refuse(message, error)
            message.replies.outcome.fail(error)
            return
        elapsed_s = time.monotonic() - start_s
        if _restored_bytes(plan):  # room for new tokens alone makes no picture
            self.traces.append(trace)
        message.replies.outcome.set(RestoreOutcome(message.restore_id, _restored_bytes(plan), elapsed_s))

    async def _refuse(self, message: RestoreContext, error: MzdError) -> None:
        """Fail before any unit moved. gpu_prefill hears it too: a step may wait for this restore already."""
        message.replies.planned.fail(error)
        if message.announce:
            await self.restore_ends.readiness.send(RestoreFailed(message.restore_id, error))

    def _plan_restore(self, cache: KvCache, message: RestoreContext) -> RestorePlan:
        """Forget what the request does not share, make the columns for what it adds, and plan."""
        intact = self._intact(cache)
        if intact < message.keep_tokens:
            raise MzdError(
                "corrupt_chunk", f"context {cache.name} has lost some of its KV", keep_tokens=intact
            )
        self._cut(cache, chunks_of(message.keep_tokens))
        plan = plan_restore(
            self.snapshot(),
            cache.name,
            keep_tokens=message.keep_tokens,
            capacity_tokens=message.capacity_tokens,
            need_head=True,
        )
        cache.grow(chunks_of(message.capacity_tokens))
        return plan

    async def _run_restore(self, cache: KvCache, message: RestoreContext, plan: RestorePlan) -> RestoreTrace:
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
        # Before anything is awaited: when its request ends meanwhile, the plan must not run over a cut cache.
        self._running = operation
        try:
            await self._collect_garbage()
            self.baseline.settle()
            await self._wait_for_memory(operation, plan.allocate_bytes)
            await operation.run()
        finally:
            self._running = None
            self._discard(_Garbage(pages=self.restore_parts.payloads.detach(operation.spent_payloads)))
            self._cut(cache, chunks_of(self._intact(cache)))
            if operation.afterwards is not None:
                operation.afterwards()
        return trace

    async def _wait_for_memory(self, operation: RestoreOperation, needed_bytes: int) -> None:
        """Wait for room above the floor; give up with the figures and keep what there is.

        Raises:
            MzdError: `insufficient_memory`.
        """
        deadline_s = trio.current_time() + self.settings.restore_wait_s
        while needed_bytes and not operation.abandoned:
            room = self.room()
            if room is None or room.available_bytes >= needed_bytes + room.floor_bytes:
                return
            if trio.current_time() >= deadline_s:
                error = MzdError(
                    "insufficient_memory",
                    f"{needed_bytes} bytes are needed above a floor of {room.floor_bytes}; "
                    f"{room.available_bytes} are available",
                    needed_bytes=needed_bytes,
                    available_bytes=room.available_bytes,
                    floor_bytes=room.floor_bytes,
                )
                operation.failure = error
                return
            await trio.sleep(MEMORY_POLL_S)

    # Evict.

    async def _evict(self, message: Evict) -> EvictOutcome:
        if message.dry_run:
            return self._dry_run(message)
        return await self._carry_out(message.goal_bytes, message.context, message.reason)

    async def _carry_out(self, goal_bytes: int, context: str | None, reason: str) -> EvictOutcome:
        start_s = time.monotonic()
        operation = EvictOperation(
            goal_bytes, partial(self._plan_eviction, context), self.evict_parts, self.evict_ends
        )
        if self.units.in_use:
            operation.warnings.append("in_use")
        await operation.run()
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

    def _plan_eviction(
        self, context: str | None, goal_bytes: int, failed: Set[Destination] = frozenset()
    ) -> EvictionPlan:
        snapshot = self.snapshot(failed)
        if context is not None:
            snapshot = snapshot.limited_to(context)
        return plan_eviction(snapshot, goal_bytes, self.settings.times, order=self.settings.eviction_order)

    def _dry_run(self, message: Evict) -> EvictOutcome:
        plan = self._plan_eviction(message.context, message.goal_bytes)
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
