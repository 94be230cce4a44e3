"""Owns the choice of what leaves memory, in which order and to where (paper, Algorithm 1).

The plan follows from the snapshot alone, the carry of the paper's floors included: how far each path
is ahead is counted from the units that are out already. So an eviction may come in any number of calls
and ends where one call would have ended.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mzd.policy.path_balance import path_costs, restore_work
from mzd.policy.profile import UnitTimes
from mzd.policy.residency import UnitState
from mzd.policy.snapshot import ContextSnapshot, CopyKind, MemorySnapshot
from mzd.policy.units import ChunkIndex, HeadUnit, KvUnit, LayerIndex, UnitId, WeightUnit

SWAP_FULL: Final = "swap_full"
"""Warning: the storage swap would have been used, and is full or off."""


class Stage(StrEnum):
    """Stages of an eviction, in order; all but HEAD are the paper's."""

    HEAD = "head"
    KV_ONLY = "KVonly"
    KV_AND_W = "KVandW"
    W_ONLY = "Wonly"
    COMP_KV = "CompKV"


class Destination(StrEnum):
    """Where a step leaves the content: let go (a copy is on flash), a payload in RAM, or flash."""

    DROPPED = "dropped"
    RAM = "ram"
    FLASH = "flash"


class Order(StrEnum):
    """Which unit goes next. All but BACKWARD exist for comparison (paper, figure 11b)."""

    BACKWARD = "backward-out"
    FORWARD = "forward-out"
    RANDOM = "random-out"


class Step(NamedTuple):
    """One unit's way out.

    `freed_bytes` is net: what the unit occupied less what its payload will. A tuple, because a plan
    has thousands of them and is made while memory is short.
    """

    stage: Stage
    unit: UnitId
    to: Destination
    freed_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What to evict, in this order.

    Attributes:
        freed_bytes: at least `goal_bytes` unless `exhausted`; without its last step it is less.
        exhausted: after these steps nothing more could go.
        warnings: `swap_full` where flash was wanted and could not take it.
        reason: one line for the log.
    """

    steps: tuple[Step, ...]
    goal_bytes: int
    freed_bytes: int
    exhausted: bool
    warnings: tuple[str, ...]
    reason: str


_HEAD_REASON: Final = "needed last, at the end of prefill"
_RAM_REASON: Final = "decompression has the shorter restore"
_FLASH_REASON: Final = "storage has the shorter restore"
_COPY_REASON: Final = "a clean copy is on flash"
_FULL_REASON: Final = "the storage swap is full or off"
_SET_ASIDE_REASON: Final = "keeps decompression busy while weights reload"
_ONLY_FLASH_REASON: Final = "there is no way to RAM for it"
_WEIGHTS_REASON: Final = "unchanged in the weight store"
_WEIGHTS_LAST_REASON: Final = "no KV is left to balance it with"
_COMP_KV_REASON: Final = "all else is gone"


def fraction_to_bytes(fraction: float, full_bytes: int) -> int:
    """The goal for a share of the whole model memory, rounded up.

    Raises:
        ValueError: `fraction` is not in 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction lies between 0 and 1, not {fraction}")
    return math.ceil(fraction * full_bytes)


def plan_eviction(
    snapshot: MemorySnapshot,
    goal_bytes: int,
    times: UnitTimes,
    *,
    order: Order = Order.BACKWARD,
    seed: int = 0,
) -> EvictionPlan:
    """Plan to free at least `goal_bytes` and less than one unit more, or all there is.

    KV of older contexts goes first, least recently used first, through KVonly. The last used context
    goes through all of Algorithm 1 with the weights: only its chunks can keep decompression busy while
    the weights come back for it, so only they are set aside. Protected and pinned units stay.

    Args:
        seed: for `Order.RANDOM`; the same seed goes on with the same order in the next call.

    Raises:
        ValueError: a negative goal.
    """
    if goal_bytes < 0:
        raise ValueError(f"{goal_bytes} bytes cannot be freed")
    planner = _Planner(snapshot, times, order, seed)
    steps: list[Step] = []
    freed_bytes = 0
    exhausted = True
    for step in planner.steps():
        if freed_bytes >= goal_bytes:
            exhausted = False
            break
        steps.append(step)
        freed_bytes += step.freed_bytes
    wanted_flash = (exhausted and planner.num_stuck > 0) or any(s.reason == _FULL_REASON for s in steps)
    return EvictionPlan(
        steps=tuple(steps),
        goal_bytes=goal_bytes,
        freed_bytes=freed_bytes,
        exhausted=exhausted,
        warnings=(SWAP_FULL,) if wanted_flash else (),
        reason=_summary(steps, freed_bytes, goal_bytes, exhausted),
    )


def _summary(steps: list[Step], freed_bytes: int, goal_bytes: int, exhausted: bool) -> str:
    stages = ", ".join(dict.fromkeys(step.stage.value for step in steps)) or "no step"
    end = "; nothing more can go" if exhausted else ""
    return f"{freed_bytes} of {goal_bytes} bytes by {stages}{end}"


class _KvQueue(NamedTuple):
    """A context's resident chunks in eviction order; `flat[i] = layer * num_chunks + chunk`."""

    context: ContextSnapshot
    flat: list[int]
    copies: list[int]
    incompressible: list[bool]


# Members of an Enum are found by a slow path in Python 3.11, felt in loops over thousands of chunks.
_KV_ONLY: Final = Stage.KV_ONLY
_KV_AND_W: Final = Stage.KV_AND_W
_RAM: Final = Destination.RAM


class _Planner:
    """The working state of one plan. `steps` may be taken once, and as far as wanted."""

    def __init__(self, snapshot: MemorySnapshot, times: UnitTimes, order: Order, seed: int) -> None:
        self._snapshot = snapshot
        self._order = order
        self._seed = seed
        self._costs = path_costs(snapshot, times)
        self._sizes = snapshot.kv_sizes
        self._has_ram_path = self._sizes.has_ram_path
        self._ram_freed_bytes = self._sizes.chunk_bytes - self._sizes.compressed_bytes
        # From here on a chunk is back sooner by flash; over many chunks the ratio is t_rKV : t_dKV.
        self._flash_from_ps = self._costs.read_ps - self._costs.decode_ps
        self._storage_left_bytes = snapshot.storage_left_bytes
        self._dropped_ps = 0  # weights let go by this plan; the snapshot accounts for those before
        self._balance_ps = 0  # codec minus storage time to restore the context at hand
        self._layers = self._evictable_layers()
        self._threshold_ps = self._set_aside_ps()
        self._compressed: dict[str, list[int]] = {}
        self.num_stuck = 0
        """Chunks and payloads that stay because only flash could take them, and cannot."""

    def steps(self) -> Iterator[Step]:
        """All steps until nothing more can go, stage after stage."""
        yield from self._evict_head()
        newest = self._newest_context()
        for context in self._snapshot.contexts:
            resident = (context.states == UnitState.RESIDENT).ravel()
            yield from self._evict_kv(self._queue(context, resident), older=context is not newest)
        while self._layers:
            yield self._drop_layer(Stage.W_ONLY, _WEIGHTS_LAST_REASON)
        for context in self._snapshot.contexts:
            yield from self._spill(context)

    def _newest_context(self) -> ContextSnapshot | None:
        """The last used context that holds anything; the one most likely asked for next."""
        return next((c for c in reversed(self._snapshot.contexts) if c.has_content), None)

    # Order

    def _visit_order(self, count: int, salt: str) -> NDArray[np.int64]:
        """Indices 0 to `count` - 1 in the order in which units leave."""
        if self._order is Order.RANDOM:
            generator = np.random.default_rng([self._seed, zlib.crc32(salt.encode())])
            return generator.permutation(count)
        forward = np.arange(count)
        return forward if self._order is Order.FORWARD else forward[::-1]

    def _evictable_layers(self) -> list[int]:
        """Layers that can be dropped, next one last."""
        weights = self._snapshot.weights
        evictable = (weights.states == UnitState.RESIDENT) & ~weights.protected
        visit = self._visit_order(weights.num_layers, "weights")
        layers: list[int] = visit[evictable[visit]].tolist()
        return layers[::-1]

    def _queue(self, context: ContextSnapshot, wanted: NDArray[np.bool_]) -> _KvQueue:
        """The `wanted` chunks (flat) that may be touched, in eviction order."""
        movable = wanted & ~context.protected.ravel() & (not context.pinned)
        visit = self._visit_order(context.states.size, context.context)
        flat = visit[movable[visit]]
        copies: list[int] = context.copies.ravel()[flat].tolist()
        incompressible: list[bool] = context.incompressible.ravel()[flat].tolist()
        return _KvQueue(context, flat.tolist(), copies, incompressible)

    # Head and weights

    def _evict_head(self) -> Iterator[Step]:
        head = self._snapshot.head
        if head.state is UnitState.RESIDENT and not head.protected:
            self._dropped_ps += self._costs.read_head_ps
            yield Step(Stage.HEAD, HeadUnit(), Destination.DROPPED, head.size_bytes, _HEAD_REASON)

    def _drop_layer(self, stage: Stage, reason: str) -> Step:
        layer = self._layers.pop()
        reload_ps = self._costs.read_layer_ps[layer]
        self._dropped_ps += reload_ps
        self._balance_ps -= reload_ps
        size_bytes = int(self._snapshot.weights.sizes_bytes[layer])
        return Step(stage, WeightUnit(LayerIndex(layer)), Destination.DROPPED, size_bytes, reason)

    # KV

    def _evict_kv(self, queue: _KvQueue, *, older: bool) -> Iterator[Step]:
        work = restore_work(self._snapshot, queue.context, self._costs)
        self._balance_ps = work.balance_ps - self._dropped_ps
        compressed = self._compressed.setdefault(queue.context.context, [])
        remaining = len(queue.flat)
        candidates = zip(queue.flat, _units(queue), queue.copies, queue.incompressible, strict=True)
        for flat, unit, copy, incompressible in candidates:
            stage, weights_reason = self._stage(remaining, copy, older)
            while stage is _KV_AND_W and self._balance_ps >= 0 and self._layers:
                yield self._drop_layer(stage, weights_reason)
                stage, weights_reason = self._stage(remaining, copy, older)
            remaining -= 1
            step = self._evict_chunk(stage, unit, copy, incompressible)
            if step is None:
                self.num_stuck += 1
                continue
            if step.to is _RAM:
                compressed.append(flat)
            yield step

    def _stage(self, remaining: int, copy: int, older: bool) -> tuple[Stage, str]:
        """KVonly while N_KV > T, else KVandW; and the reason for which a weight layer would go.

        T counts the layers that are out already, as the paper's does. Without room on flash there is
        only one swap space and nothing to split: then weights are the sole counterweight, and go with
        the chunks for as long as there are any.
        """
        if older or not self._threshold_ps:
            return _KV_ONLY, ""
        if remaining * self._costs.decode_ps <= self._threshold_ps:
            return _KV_AND_W, _WEIGHTS_REASON
        if not self._layers or copy or self._storage_left_bytes >= self._sizes.slot_bytes:
            return _KV_ONLY, ""
        return _KV_AND_W, _FULL_REASON

    def _set_aside_ps(self) -> int:
        """T, in decompression time: what reloading all weights that are out or may go will take."""
        if not self._has_ram_path:
            return 0
        dropped = np.flatnonzero(self._snapshot.weights.states == UnitState.DROPPED).tolist()
        return sum(self._costs.read_layer_ps[layer] for layer in (*dropped, *self._layers))

    def _evict_chunk(self, stage: Stage, unit: KvUnit, copy: int, incompressible: bool) -> Step | None:
        """The chunk's way out, taken into account; None where nothing can take it.

        What flash holds already is let go whatever the balance says: memory comes free at once and nothing
        is written. It counts as storage's work, so that chunks without a copy make up for it.
        """
        if copy:
            self._balance_ps += self._costs.stored_ps(CopyKind(copy))
            return Step(stage, unit, Destination.DROPPED, self._sizes.chunk_bytes, _COPY_REASON)
        has_flash = self._storage_left_bytes >= self._sizes.slot_bytes
        # A remainder may outlast the weights; then nothing but flash can balance it.
        may_split = stage is _KV_ONLY or not self._layers
        wants_flash = may_split and self._balance_ps > self._flash_from_ps
        has_ram = self._has_ram_path and not incompressible
        if has_ram and not (wants_flash and has_flash):
            self._balance_ps += self._costs.decode_ps
            return Step(stage, unit, _RAM, self._ram_freed_bytes, _ram_reason(stage, wants_flash))
        if not has_flash:
            return None
        self._balance_ps += self._costs.stored_ps(CopyKind.NONE)
        self._storage_left_bytes -= self._sizes.slot_bytes
        reason = _FLASH_REASON if has_ram else _ONLY_FLASH_REASON
        return Step(stage, unit, Destination.FLASH, self._sizes.chunk_bytes, reason)

    def _spill(self, context: ContextSnapshot) -> Iterator[Step]:
        """CompKV: payloads leave RAM, those that this plan has made included."""
        in_ram = (context.states == UnitState.COMPRESSED).ravel()
        in_ram[self._compressed.get(context.context, [])] = True
        queue = self._queue(context, in_ram)
        stage, size_bytes = Stage.COMP_KV, self._sizes.compressed_bytes
        for unit, copy in zip(_units(queue), queue.copies, strict=True):
            if copy:
                yield Step(stage, unit, Destination.DROPPED, size_bytes, _COPY_REASON)
            elif self._storage_left_bytes >= self._sizes.compressed_slot_bytes:
                self._storage_left_bytes -= self._sizes.compressed_slot_bytes
                yield Step(stage, unit, Destination.FLASH, size_bytes, _COMP_KV_REASON)
            else:
                self.num_stuck += 1


def _units(queue: _KvQueue) -> Iterator[KvUnit]:
    """The queue's chunks by name, made one by one: most evictions are short."""
    name, num_chunks = queue.context.context, queue.context.num_chunks
    for flat in queue.flat:
        layer, chunk = divmod(flat, num_chunks)
        yield KvUnit(name, LayerIndex(layer), ChunkIndex(chunk))


def _ram_reason(stage: Stage, wants_flash: bool) -> str:
    if wants_flash:
        return _FULL_REASON
    return _RAM_REASON if stage is _KV_ONLY else _SET_ASIDE_REASON
