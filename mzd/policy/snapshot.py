"""Owns the frozen picture of all units that plans are made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mzd.policy.residency import UnitState

States = NDArray[np.uint8]
Flags = NDArray[np.bool_]


class CopyKind(IntEnum):
    """Which clean copy of a chunk's present content lies on flash."""

    NONE = 0
    STORED = 1
    STORED_COMPRESSED = 2


@dataclass(frozen=True, slots=True, eq=False)
class WeightsSnapshot:
    """All weight layers, in forward order.

    Attributes:
        sizes_bytes: (num_layers,) int64, what each layer occupies in memory.
        states: (num_layers,) uint8 of `UnitState`.
        protected: (num_layers,) bool; in use or pinned: never evicted.
    """

    sizes_bytes: NDArray[np.int64]
    states: States
    protected: Flags

    def __post_init__(self) -> None:
        if not self.sizes_bytes.shape == self.states.shape == self.protected.shape:
            raise ValueError("sizes, states and protection of the weight layers differ in shape")

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.sizes_bytes)


@dataclass(frozen=True, slots=True)
class HeadSnapshot:
    """The head unit: token embedding, output norm and output matrix."""

    size_bytes: int
    state: UnitState
    protected: bool


@dataclass(frozen=True, slots=True)
class KvSizes:
    """What one chunk occupies, everywhere the same, each rounded as its owner rounds it.

    Attributes:
        chunk_bytes: a shared buffer.
        compressed_bytes: a payload in the in-memory swap. Not below `chunk_bytes`: the codec saves
            nothing (`none`), and there is no way to RAM.
        slot_bytes: an FP16 copy on flash.
        compressed_slot_bytes: a payload on flash.
    """

    chunk_bytes: int
    compressed_bytes: int
    slot_bytes: int
    compressed_slot_bytes: int

    @property
    def has_ram_path(self) -> bool:
        """Whether compressing a chunk frees memory."""
        return self.compressed_bytes < self.chunk_bytes


@dataclass(frozen=True, slots=True, eq=False)
class ContextSnapshot:
    """One context's chunks. All arrays are (num_layers, num_chunks).

    Attributes:
        states: uint8 of `UnitState`.
        copies: uint8 of `CopyKind`; says nothing new where the state itself is on flash.
        protected: bool; in use: never evicted.
        incompressible: bool; the codec refused the content (Inf or NaN): flash is the only way.
        pinned: the user wants all of it kept as it is.
    """

    context: str
    states: States
    copies: States
    protected: Flags
    incompressible: Flags
    pinned: bool = False

    def __post_init__(self) -> None:
        shape = self.states.shape
        if not shape == self.copies.shape == self.protected.shape == self.incompressible.shape:
            raise ValueError(f"the arrays of context {self.context} differ in shape")

    @property
    def num_chunks(self) -> int:
        """Chunks of each layer."""
        return int(self.states.shape[1])

    @property
    def has_content(self) -> bool:
        """Whether any chunk holds tokens."""
        return bool((self.states != UnitState.ABSENT).any())


@dataclass(frozen=True, slots=True, eq=False)
class MemorySnapshot:
    """Every unit at one moment. Cheap to build: arrays, no object a unit.

    Attributes:
        contexts: least recently used first.
        storage_left_bytes: what the storage swap may still take; 0 when it is full or turned off.

    Raises:
        ValueError: a context has another number of layers than the weights.
    """

    weights: WeightsSnapshot
    head: HeadSnapshot
    contexts: tuple[ContextSnapshot, ...]
    kv_sizes: KvSizes
    storage_left_bytes: int

    def __post_init__(self) -> None:
        for context in self.contexts:
            if context.states.shape[0] != self.weights.num_layers:
                raise ValueError(f"context {context.context} does not have {self.weights.num_layers} layers")

    @property
    def full_bytes(self) -> int:
        """Weights, head and all KV, were everything resident."""
        num_chunks = sum(int((c.states != UnitState.ABSENT).sum()) for c in self.contexts)
        weights_bytes = int(self.weights.sizes_bytes.sum())
        return weights_bytes + self.head.size_bytes + num_chunks * self.kv_sizes.chunk_bytes

    def context(self, name: str) -> ContextSnapshot:
        """The context of that name.

        Raises:
            KeyError: there is none.
        """
        for context in self.contexts:
            if context.context == name:
                return context
        raise KeyError(name)

    def limited_to(self, name: str) -> MemorySnapshot:
        """The same picture with everything protected that is not KV of the context `name`."""
        weights = replace(self.weights, protected=np.ones_like(self.weights.protected))
        contexts = tuple(c if c.context == name else replace(c, pinned=True) for c in self.contexts)
        return replace(self, weights=weights, head=replace(self.head, protected=True), contexts=contexts)

    def without_compression(self) -> MemorySnapshot:
        """The same picture with no chunk that could be compressed: there is no memory for payloads."""
        refused = (replace(c, incompressible=np.ones_like(c.incompressible)) for c in self.contexts)
        return replace(self, contexts=tuple(refused))
