"""Owns which unit is in which state and where it lies. The allocator alone changes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mzd.formats.prefix_hash import prefix_hashes
from mzd.memory.backend import Lease
from mzd.memory.in_memory_swap import Slot
from mzd.policy.residency import BUFFER_STATES, Event, UnitState, advance, advance_all
from mzd.policy.snapshot import (
    ContextSnapshot,
    CopyKind,
    HeadSnapshot,
    KvSizes,
    MemorySnapshot,
    WeightsSnapshot,
)
from mzd.policy.units import CHUNK_TOKENS, ChunkIndex, HeadUnit, KvUnit, LayerIndex, UnitId, WeightUnit

Place = tuple[int, int]
"""(layer, chunk) of one context."""


def chunks_of(num_tokens: int) -> int:
    """Chunks that `num_tokens` tokens take."""
    return -(-num_tokens // CHUNK_TOKENS)


@dataclass(slots=True)
class WholeUnit:
    """A weight layer or the head unit: in a lease, or only in the weight store."""

    size_bytes: int
    state: UnitState = UnitState.DROPPED
    lease: Lease | None = None

    def apply(self, event: Event) -> None:
        """Move along one arrow of the transition table."""
        self.state = advance(self.state, event)

    def take_lease(self) -> Lease:
        """Hand out the lease for release. A unit without one is a broken invariant."""
        lease, self.lease = self.lease, None
        if lease is None:
            raise RuntimeError("a unit without a lease was let go")
        return lease


@dataclass(slots=True)
class KvCache:
    """The KV of one context, by (layer, chunk).

    Attributes:
        tokens: (n,) uint32, ids whose KV is computed.
        states: (layers, chunks) uint8 of `UnitState`.
        copies: (layers, chunks) uint8 of `CopyKind`: what flash holds of the present content.
        incompressible: (layers, chunks) bool: the codec refused the content.
        leases, payloads: of chunks that are in a buffer, or in the in-memory swap.
        hashes: of every chunk's prefix of tokens (`prefix_hashes`).
        in_use: a request runs over it: protected.
    """

    name: str
    num_layers: int
    tokens: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    states: NDArray[np.uint8] = field(init=False)
    copies: NDArray[np.uint8] = field(init=False)
    incompressible: NDArray[np.bool_] = field(init=False)
    leases: dict[Place, Lease] = field(default_factory=dict)
    payloads: dict[Place, Slot] = field(default_factory=dict)
    last_used_s: float = 0.0
    in_use: bool = False
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = np.empty((self.num_layers, 0), np.uint8)
        self.copies = np.empty((self.num_layers, 0), np.uint8)
        self.incompressible = np.empty((self.num_layers, 0), np.bool_)

    @property
    def num_chunks(self) -> int:
        """Chunks of each layer."""
        return int(self.states.shape[1])

    def state(self, place: Place) -> UnitState:
        """The state of one chunk."""
        return UnitState(int(self.states[place]))

    def apply(self, place: Place, event: Event) -> None:
        """Move one chunk along one arrow of the transition table."""
        self.states[place] = advance(self.state(place), event)

    def apply_row(self, layer: int, chunks: Sequence[int], event: Event) -> None:
        """Move several chunks of one layer along one arrow: all of them, or none if one cannot."""
        columns = np.asarray(chunks, np.intp)
        self.states[layer, columns] = advance_all(self.states[layer, columns], event)

    def unit(self, place: Place) -> KvUnit:
        """The name of one chunk."""
        return KvUnit(self.name, LayerIndex(place[0]), ChunkIndex(place[1]))

    def grow(self, num_chunks: int) -> None:
        """Add chunks that hold nothing yet (ABSENT)."""
        shape = (self.num_layers, max(0, num_chunks - self.num_chunks))
        self.states = np.concatenate([self.states, np.full(shape, UnitState.ABSENT, np.uint8)], axis=1)
        self.copies = np.concatenate([self.copies, np.full(shape, CopyKind.NONE, np.uint8)], axis=1)
        self.incompressible = np.concatenate([self.incompressible, np.zeros(shape, np.bool_)], axis=1)

    def cut(self, num_chunks: int) -> tuple[list[Lease], list[Slot]]:
        """Forget all chunks from `num_chunks` on; returns what they held, for the caller to release."""
        for place in np.argwhere(self.states[:, num_chunks:] != UnitState.ABSENT):
            self.apply((int(place[0]), int(place[1]) + num_chunks), Event.FORGET)
        leases = [self.leases.pop(place) for place in list(self.leases) if place[1] >= num_chunks]
        slots = [self.payloads.pop(place) for place in list(self.payloads) if place[1] >= num_chunks]
        self.states = self.states[:, :num_chunks].copy()
        self.copies = self.copies[:, :num_chunks].copy()
        self.incompressible = self.incompressible[:, :num_chunks].copy()
        return leases, slots

    def tokens_in(self, chunk: int) -> int:
        """Computed tokens of one chunk."""
        return max(0, min(CHUNK_TOKENS, len(self.tokens) - chunk * CHUNK_TOKENS))

    def prefix_hash(self, chunk: int) -> bytes:
        """What ties a chunk to all tokens up to its end."""
        return self.hashes[chunk]

    def set_tokens(self, tokens: NDArray[np.uint32]) -> None:
        """Take the ids whose KV is computed now."""
        self.tokens = tokens
        self.hashes = prefix_hashes(tokens, chunk_tokens=CHUNK_TOKENS)

    def chunk_addresses(self, layer: int) -> NDArray[np.uint64]:
        """(chunks,) uint64: the chunk table of one layer; every chunk must be in a buffer."""
        return np.array([self.leases[layer, chunk].address for chunk in range(self.num_chunks)], np.uint64)

    def count(self, states: Iterable[UnitState]) -> int:
        """Chunks that are in one of `states`."""
        return int(np.isin(self.states, list(states)).sum())

    def snapshot(self) -> ContextSnapshot:
        """A copy for the planner."""
        return ContextSnapshot(
            context=self.name,
            states=self.states.copy(),
            copies=self.copies.copy(),
            protected=np.full(self.states.shape, self.in_use),
            incompressible=self.incompressible.copy(),
        )


class UnitTable:
    """All units of the daemon.

    Args:
        layer_sizes: bytes of each weight layer.
        head_bytes: bytes of the head unit.
        kv_sizes: bytes of a chunk in each place.
    """

    def __init__(self, layer_sizes: Sequence[int], head_bytes: int, kv_sizes: KvSizes) -> None:
        self.weights = [WholeUnit(size) for size in layer_sizes]
        self.head = WholeUnit(head_bytes)
        self.kv_sizes = kv_sizes
        self.caches: dict[str, KvCache] = {}

    @property
    def in_use(self) -> bool:
        """A request runs, so that the weights are needed."""
        return any(cache.in_use for cache in self.caches.values())

    def cache(self, name: str) -> KvCache:
        """The KV of a context, made when there is none."""
        return self.caches.setdefault(name, KvCache(name, len(self.weights)))

    def whole(self, unit: WeightUnit | HeadUnit) -> WholeUnit:
        """The record of a unit that comes from the weight store."""
        return self.head if isinstance(unit, HeadUnit) else self.weights[unit.layer]

    def apply(self, unit: UnitId, event: Event) -> None:
        """Move any unit along one arrow of the transition table."""
        if isinstance(unit, KvUnit):
            self.caches[unit.context].apply((unit.layer, unit.chunk), event)
        else:
            self.whole(unit).apply(event)

    @property
    def weights_bytes(self) -> int:
        """Bytes of weight layers that hold a buffer."""
        return sum(unit.size_bytes for unit in self.weights if unit.state in BUFFER_STATES)

    @property
    def head_bytes(self) -> int:
        """Bytes of the head unit, when it holds a buffer."""
        return self.head.size_bytes if self.head.state in BUFFER_STATES else 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all chunks that hold a buffer."""
        return sum(c.count(BUFFER_STATES) for c in self.caches.values()) * self.kv_sizes.chunk_bytes

    @property
    def idle_kv_bytes(self) -> int:
        """Bytes of chunks that hold a buffer and that no request uses."""
        idle = (cache for cache in self.caches.values() if not cache.in_use)
        return sum(cache.count(BUFFER_STATES) for cache in idle) * self.kv_sizes.chunk_bytes

    def resident_bytes(self) -> int:
        """Bytes of all units that hold a buffer."""
        return self.weights_bytes + self.head_bytes + self.kv_bytes

    def snapshot(self, storage_left_bytes: int) -> MemorySnapshot:
        """A copy of everything, for the planner; least recently used context first."""
        return MemorySnapshot(
            weights=WeightsSnapshot(
                sizes_bytes=np.array([unit.size_bytes for unit in self.weights], np.int64),
                states=np.array([unit.state for unit in self.weights], np.uint8),
                protected=np.full(len(self.weights), self.in_use),
            ),
            head=HeadSnapshot(self.head.size_bytes, self.head.state, protected=self.in_use),
            contexts=tuple(
                cache.snapshot()
                for cache in sorted(self.caches.values(), key=lambda cache: cache.last_used_s)
            ),
            kv_sizes=self.kv_sizes,
            storage_left_bytes=storage_left_bytes,
        )
