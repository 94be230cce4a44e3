"""Owns watching for memory pressure, and asking for evictions because of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import trio

from mzd.errors import MzdError
from mzd.memory.pressure_triggers import PressureTrigger, TriggerGoneError, close_all
from mzd.messages.evict_path import Evict, EvictOutcome
from mzd.messages.reply import Reply
from mzd.policy.pressure import (
    CgroupReading,
    Decision,
    Level,
    MemoryReading,
    ModelMemory,
    PressurePolicy,
    PressureSnapshot,
    PressureUnknown,
    PsiReading,
    Signal,
    available_and_floor,
    decide,
    next_poll_s,
    pressure_level,
)

logger = logging.getLogger(__name__)

BARREN_REST_S: Final = 1.0
"""After an eviction that freed nothing: all is in use, and asking at every poll would change nothing."""


class Probes(Protocol):
    """What is read before each decision; `memory.pressure_sources.PressureProbes` is the real one."""

    def psi(self) -> PsiReading | PressureUnknown:
        """Stall now."""

    def memory(self) -> MemoryReading | PressureUnknown:
        """The system's memory now."""

    def cgroup_memory(self) -> CgroupReading | PressureUnknown:
        """Our tightest memory group now."""


@dataclass(frozen=True, slots=True)
class PressureStatistics:
    """What `status` says of pressure.

    Attributes:
        source: what is watched, joined by `+`.
        available_bytes, floor_bytes: of the place nearest to its floor; None while unknown.
        last_decision: the last one that asked for memory, or held back; None before the first.
    """

    source: str
    level: Level
    available_bytes: int | None
    floor_bytes: int | None
    last_decision: Decision | None


@dataclass(slots=True)
class PressureMonitor:
    """Evict path, step 1. Takes a snapshot at each trigger and at each poll, and asks the policy.

    One eviction at a time: the next look comes after the answer to the last, so that no shortage is
    answered twice. Nothing is sent to this actor, so its wait for a reply closes no cycle.

    Cancelled: closes its channel and the triggers, which it owns; an eviction that was asked for goes on.

    Attributes:
        triggers: watched until the end; may be empty.
        model_memory: what the model holds now; called before each decision, never blocks.
        evictions: to the allocator; closed at the end.
    """

    probes: Probes
    triggers: tuple[PressureTrigger, ...]
    policy: PressurePolicy
    model_memory: Callable[[], ModelMemory]
    evictions: trio.MemorySendChannel[Evict]
    _wake: trio.Event = field(default_factory=trio.Event, init=False)
    _triggered: bool = field(default=False, init=False)
    _previous: PressureSnapshot | None = field(default=None, init=False)
    _last_evict_s: float = field(default=-math.inf, init=False)
    _barren_until_s: float = field(default=-math.inf, init=False)
    _last_decision: Decision | None = field(default=None, init=False)
    _unknown_said: set[str] = field(default_factory=set, init=False)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled, or until nobody takes evictions any more."""
        try:
            async with self.evictions, trio.open_nursery() as nursery:
                for trigger in self.triggers:
                    nursery.start_soon(self._forward_events, trigger)
                task_status.started()
                await self._watch()
                nursery.cancel_scope.cancel()
        finally:
            close_all(self.triggers)

    def look_now(self) -> None:
        """Do not wait for the next poll: something has become resident, or evictable."""
        self._barren_until_s = -math.inf
        self._wake.set()

    def statistics(self) -> PressureStatistics:
        """A frozen view, as of the last look."""
        snapshot = self._previous
        level, available_bytes, floor_bytes = Level.UNKNOWN, None, None
        if snapshot is not None:
            level = pressure_level(snapshot, self.policy)
            room = available_and_floor(snapshot, self.policy)
            if not isinstance(room, PressureUnknown):
                available_bytes, floor_bytes = room
        return PressureStatistics(self._source(), level, available_bytes, floor_bytes, self._last_decision)

    def _source(self) -> str:
        """The probes that answered last; a memory group without a limit answers nothing."""
        snapshot = self._previous
        if snapshot is None:
            return "none"
        cgroup = snapshot.cgroup
        is_known = {
            "psi": isinstance(snapshot.psi, PsiReading),
            "meminfo": isinstance(snapshot.memory, MemoryReading),
            "cgroup": isinstance(cgroup, CgroupReading) and cgroup.limit_bytes is not None,
        }
        return "+".join(name for name, known in is_known.items() if known) or "none"

    async def _forward_events(self, trigger: PressureTrigger) -> None:
        try:
            while True:
                await trigger.wait()
                self._triggered = True
                self._wake.set()
        except TriggerGoneError as error:
            logger.warning("pressure trigger gone: source=%s reason=%s", trigger.source, error)

    async def _watch(self) -> None:
        """Look, act, wait; ends when the allocator has closed its inbox."""
        while True:
            snapshot = self._take_snapshot()
            model = self._current_model()
            decision = decide(snapshot, self._previous, self.policy, model, last_evict_s=self._last_evict_s)
            self._previous = snapshot
            try:
                await self._act(decision)
            except trio.BrokenResourceError:
                return
            await self._wait(next_poll_s(snapshot, self.policy, model))

    async def _wait(self, poll_s: float) -> None:
        """Until the next poll, a trigger, or the end of a rest."""
        rest_s = self._barren_until_s - trio.current_time()
        with trio.move_on_after(min(poll_s, rest_s) if rest_s > 0 else poll_s):
            await self._wake.wait()
        self._wake = trio.Event()

    def _current_model(self) -> ModelMemory:
        """What the model holds; nothing is evictable for a while after an eviction that freed nothing."""
        model = self.model_memory()
        if trio.current_time() < self._barren_until_s:
            return replace(model, evictable_bytes=0)
        return model

    def _take_snapshot(self) -> PressureSnapshot:
        snapshot = PressureSnapshot(
            psi=self.probes.psi(),
            memory=self.probes.memory(),
            cgroup=self.probes.cgroup_memory(),
            triggered=self._triggered,
            now_s=trio.current_time(),
        )
        self._triggered = False
        for name, reading in (
            ("psi", snapshot.psi),
            ("meminfo", snapshot.memory),
            ("cgroup", snapshot.cgroup),
        ):
            if isinstance(reading, PressureUnknown) and name not in self._unknown_said:
                self._unknown_said.add(name)
                logger.warning("pressure source missing: source=%s reason=%s", name, reading.reason)
        return snapshot

    async def _act(self, decision: Decision) -> None:
        """Ask for an eviction, or hold back; either way say so once."""
        if decision.evict_bytes:
            await self._evict(decision)
        elif decision.signal is not Signal.NONE and not self._is_repeated(decision):
            logger.info("no eviction for pressure: %s", _fields(decision))
        if decision.signal is not Signal.NONE:
            self._last_decision = decision

    def _is_repeated(self, decision: Decision) -> bool:
        """The same sign held back again; its figures change at each look, what it means does not."""
        last = self._last_decision
        return last is not None and not last.evict_bytes and last.signal is decision.signal

    async def _evict(self, decision: Decision) -> None:
        reply: Reply[EvictOutcome] = Reply()
        started_s = trio.current_time()
        await self.evictions.send(
            Evict(decision.evict_bytes, f"{decision.signal}: {decision.reason}", False, None, reply)
        )
        freed_bytes, error = 0, ""
        try:
            outcome = await reply.get()
            freed_bytes = outcome.freed_bytes
        except MzdError as refusal:
            error = f" error={refusal.code}"
        now_s = self._last_evict_s = trio.current_time()
        if not freed_bytes:
            self._barren_until_s = now_s + BARREN_REST_S
        logger.info(
            "evicted for pressure: %s freed_bytes=%d%s duration_s=%.4f",
            _fields(decision),
            freed_bytes,
            error,
            now_s - started_s,
        )


def _fields(decision: Decision) -> str:
    return (
        f"signal={decision.signal} threshold={decision.threshold:g} value={decision.value:g}"
        f" asked_bytes={decision.evict_bytes} reason={decision.reason!r}"
    )
