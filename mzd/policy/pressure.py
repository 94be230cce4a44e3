"""Owns the decision whether memory is short, and how much to give back because of it.

Three things are watched, because each is blind to something: stall (PSI) comes too late where there is
no swap, and fires with most of memory free where there is zram; MemAvailable does not see a limit on our
own memory group; that group does not see the rest of the system. Any one of them may be missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

MIB: Final = 1024 * 1024

FLOOR_SHARE: Final = 0.10
"""Of the memory in question, when the configuration names no floor; what earlyoom acts at."""

FLOOR_BYTES_MAX: Final = 1024 * MIB
"""A tenth of a large machine is no shortage; half a second of a hog at 2 GB/s is."""

LOW_FLOORS: Final = 2
"""Stall counts when less than this many floors are available, else it is a false alarm."""

TRIGGER_STALL_US: Final = 150_000
TRIGGER_WINDOW_US: Final = 2_000_000
"""When a PSI trigger fires: earlier than systemd's default (200 ms), in the only window that needs no
privilege."""

TRIGGER_STALL_PERCENT: Final = 100 * TRIGGER_STALL_US / TRIGGER_WINDOW_US

PSI_REST_S: Final = 2.0
"""After an eviction, stall is believed again when what came before it has left the trigger's window."""

POLL_S_MIN: Final = 0.02
HOG_BYTES_PER_S: Final = 2 * 1024 * MIB
"""The fastest allocator planned for: polls come so often that it cannot pass the floor unseen by much."""

IDLE_POLL_S: Final = 5.0
"""Between polls while nothing could be evicted anyway."""


@dataclass(frozen=True, slots=True)
class PressureUnknown:
    """A probe that could not be read. Never zero, never "no pressure"."""

    reason: str


@dataclass(frozen=True, slots=True)
class PsiReading:
    """Stall as the kernel accounts for it: averages in percent of time, totals since boot."""

    some_avg10: float
    full_avg10: float
    some_total_us: int
    full_total_us: int


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The system's memory. `available_bytes` is MemAvailable: page cache that can be dropped is in it."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int


@dataclass(frozen=True, slots=True)
class CgroupReading:
    """The memory group with the least room, our own or one above it.

    Attributes:
        group: its path.
        usage_bytes: all that is charged, page cache included.
        reclaimable_bytes: page cache in it that can be dropped.
        limit_bytes: the lower of its limits (`memory.max`, `memory.high`); None where it has none.
    """

    group: str
    usage_bytes: int
    reclaimable_bytes: int
    limit_bytes: int | None

    def available_in(self, limit_bytes: int) -> int:
        """What the group may still take within `limit_bytes`; below zero where it is above `memory.high`."""
        return limit_bytes - self.usage_bytes + self.reclaimable_bytes


@dataclass(frozen=True, slots=True)
class PressureSnapshot:
    """All probes at one moment. `triggered`: a PSI trigger has fired since the snapshot before."""

    psi: PsiReading | PressureUnknown
    memory: MemoryReading | PressureUnknown
    cgroup: CgroupReading | PressureUnknown
    triggered: bool
    now_s: float


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The model's memory. `full_bytes`: were all of it resident; `evictable_bytes`: what could go now."""

    full_bytes: int
    evictable_bytes: int


@dataclass(frozen=True, slots=True)
class PressurePolicy:
    """When to act, and in what steps.

    Attributes:
        floor_bytes: keep this much available; 0 for a tenth of all memory, at most 1 GiB.
        step_fraction: of the whole model, given back at once when pressure rises.
        poll_s: the longest time between two looks while something could be evicted.
        psi_some_avg10, psi_full_avg10: percent of time from which stall is pressure.
    """

    floor_bytes: int = 0
    step_fraction: float = 0.25
    poll_s: float = 0.25
    psi_some_avg10: float = 10.0
    psi_full_avg10: float = 5.0

    def floor_of(self, total_bytes: int) -> int:
        """The floor within `total_bytes` of memory, be it the machine's or a group's limit."""
        tenth = min(int(total_bytes * FLOOR_SHARE), FLOOR_BYTES_MAX)
        return self.floor_bytes or tenth

    def group_floor_of(self, limit_bytes: int) -> int:
        """A group's floor: a floor meant for the machine would never be reached in a small group."""
        return min(self.floor_of(limit_bytes), int(limit_bytes * FLOOR_SHARE))


class Signal(StrEnum):
    """What a decision rests on."""

    NONE = "none"
    MEM_AVAILABLE = "mem_available"
    CGROUP = "cgroup"
    PSI_TRIGGER = "psi_trigger"
    PSI_SOME = "psi_some"
    PSI_FULL = "psi_full"


@dataclass(frozen=True, slots=True)
class Decision:
    """How many bytes to evict (0: none), and why.

    Attributes:
        signal: the strongest sign that was seen, also where nothing follows from it.
        threshold, value: of that signal: bytes available, or percent of stall. 0 for `none`.
    """

    evict_bytes: int
    reason: str
    signal: Signal
    threshold: float
    value: float


class Level(StrEnum):
    """Pressure in one word, for `status`."""

    UNKNOWN = "unknown"
    NONE = "none"
    LOW = "low"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class _Room:
    """What is available in one place, beside the floor there."""

    signal: Signal
    available_bytes: int
    floor_bytes: int

    @property
    def shortfall_bytes(self) -> int:
        return max(0, self.floor_bytes - self.available_bytes)

    @property
    def is_low(self) -> bool:
        return self.available_bytes < LOW_FLOORS * self.floor_bytes


@dataclass(frozen=True, slots=True)
class _Stall:
    signal: Signal
    threshold: float
    value: float


class MemoryRoom(NamedTuple):
    """What the place that is nearest to its floor has available, and that floor."""

    available_bytes: int
    floor_bytes: int


def available_and_floor(snapshot: PressureSnapshot, policy: PressurePolicy) -> MemoryRoom | PressureUnknown:
    """The room of the place that is nearest to its floor; unknown if none can be read."""
    rooms = _rooms(snapshot, policy)
    if not rooms:
        return PressureUnknown("neither MemAvailable nor a limit of the memory group can be read")
    return MemoryRoom(max(0, rooms[0].available_bytes), rooms[0].floor_bytes)


def pressure_level(snapshot: PressureSnapshot, policy: PressurePolicy) -> Level:
    """How short memory is; stall plays no part, because alone it says nothing."""
    rooms = _rooms(snapshot, policy)
    if not rooms:
        return Level.UNKNOWN
    if any(room.shortfall_bytes for room in rooms):
        return Level.CRITICAL
    return Level.LOW if any(room.is_low for room in rooms) else Level.NONE


def next_poll_s(snapshot: PressureSnapshot, policy: PressurePolicy, model: ModelMemory) -> float:
    """How long nobody needs to look: sooner the nearer the floor, rarely when nothing can be evicted."""
    if not model.evictable_bytes:
        return max(IDLE_POLL_S, policy.poll_s)
    rooms = _rooms(snapshot, policy)
    if not rooms:
        return policy.poll_s
    margin_bytes = rooms[0].available_bytes - rooms[0].floor_bytes
    return min(policy.poll_s, max(POLL_S_MIN, margin_bytes / HOG_BYTES_PER_S))


def decide(
    snapshot: PressureSnapshot,
    previous: PressureSnapshot | None,
    policy: PressurePolicy,
    model: ModelMemory,
    *,
    last_evict_s: float = -math.inf,
) -> Decision:
    """Decide whether to evict now.

    A floor crossed acts by itself: the system's, or that of a limited memory group. Stall acts only
    together with low availability, and only when it is not an eviction's own past.

    Args:
        previous: the snapshot before; stall must have grown since. None for the first.
        last_evict_s: when memory was last given back because of pressure.
    """
    rooms = _rooms(snapshot, policy)
    stall = _stall(snapshot, previous, policy)
    step_bytes = math.ceil(policy.step_fraction * model.full_bytes)
    short = max(rooms, key=lambda room: room.shortfall_bytes, default=None)
    if short is not None and short.shortfall_bytes:
        return _evict_for_floor(short, step_bytes, model)
    if stall is None:
        return Decision(0, "no pressure" if rooms else "nothing can be read", Signal.NONE, 0.0, 0.0)
    held = _why_held(rooms, snapshot.now_s - last_evict_s, model)
    if held is not None:
        return Decision(0, held, stall.signal, stall.threshold, stall.value)
    reason = f"stall with only {rooms[0].available_bytes} bytes available"
    return Decision(step_bytes, reason, stall.signal, stall.threshold, stall.value)


def _evict_for_floor(room: _Room, step_bytes: int, model: ModelMemory) -> Decision:
    threshold, value = float(room.floor_bytes), float(room.available_bytes)
    if not model.evictable_bytes:
        return Decision(0, "below the floor, but nothing can be evicted", room.signal, threshold, value)
    asked_bytes = max(step_bytes, room.shortfall_bytes)
    return Decision(
        asked_bytes, f"{room.shortfall_bytes} bytes below the floor", room.signal, threshold, value
    )


def _why_held(rooms: list[_Room], since_evict_s: float, model: ModelMemory) -> str | None:
    """Why stall is not acted on; None if it is."""
    if not rooms:
        return "stall, but how much is available cannot be read"
    if not any(room.is_low for room in rooms):
        return f"false alarm: stall, but {rooms[0].available_bytes} bytes are available"
    if not model.evictable_bytes:
        return "stall, but nothing can be evicted"
    if since_evict_s < PSI_REST_S:
        return "stall, but it may be from before the last eviction"
    return None


def _rooms(snapshot: PressureSnapshot, policy: PressurePolicy) -> list[_Room]:
    """Places where room can be told, the one nearest to its floor first."""
    rooms = []
    memory, cgroup = snapshot.memory, snapshot.cgroup
    if isinstance(memory, MemoryReading):
        floor_bytes = policy.floor_of(memory.total_bytes)
        rooms.append(_Room(Signal.MEM_AVAILABLE, memory.available_bytes, floor_bytes))
    if isinstance(cgroup, CgroupReading) and cgroup.limit_bytes is not None:
        floor_bytes = policy.group_floor_of(cgroup.limit_bytes)
        rooms.append(_Room(Signal.CGROUP, cgroup.available_in(cgroup.limit_bytes), floor_bytes))
    return sorted(rooms, key=lambda room: room.available_bytes - room.floor_bytes)


def _stall(
    snapshot: PressureSnapshot, previous: PressureSnapshot | None, policy: PressurePolicy
) -> _Stall | None:
    """The strongest stall that goes on now; averages alone tell of the last ten seconds."""
    psi = snapshot.psi
    if isinstance(psi, PsiReading):
        before = previous.psi if previous is not None else None
        since = before if isinstance(before, PsiReading) else PsiReading(0.0, 0.0, 0, 0)
        if psi.full_avg10 >= policy.psi_full_avg10 and psi.full_total_us > since.full_total_us:
            return _Stall(Signal.PSI_FULL, policy.psi_full_avg10, psi.full_avg10)
        if psi.some_avg10 >= policy.psi_some_avg10 and psi.some_total_us > since.some_total_us:
            return _Stall(Signal.PSI_SOME, policy.psi_some_avg10, psi.some_avg10)
    if snapshot.triggered:
        # The kernel says only "at least this much"; no average is needed to believe it.
        return _Stall(Signal.PSI_TRIGGER, TRIGGER_STALL_PERCENT, TRIGGER_STALL_PERCENT)
    return None
