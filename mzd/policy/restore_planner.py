"""Owns what a request needs back, in the order in which the device will need it (paper, 4.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mzd.policy.residency import SETTLED_STATES, UnitState
from mzd.policy.snapshot import ContextSnapshot, MemorySnapshot
from mzd.policy.units import CHUNK_TOKENS, ChunkIndex, HeadUnit, KvUnit, LayerIndex, UnitId, WeightUnit


class LostContentError(ValueError):
    """Cached tokens were asked for whose KV is gone; `intact_tokens` tells how many are there."""


class UnsettledUnitError(RuntimeError):
    """A plan was asked for while work on a unit was in flight: a broken invariant."""


class Allocation(NamedTuple):
    """Memory that a unit needs before its content can come."""

    unit: UnitId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LayerRestore:
    """What one layer lacks. Chunk indices ascend, which is also the order in which payloads were
    pushed last: the in-memory swap pops them from its top.

    Attributes:
        weights_bytes: of the layer's weights if they must be loaded, else 0.
        decode: chunks whose payload is in RAM.
        read: chunks whose FP16 copy is on flash.
        read_decode: chunks whose payload is on flash.
        allocate: new chunks, for tokens to come.
        forget: chunks behind the kept tokens; their content goes, wherever it is.
    """

    layer: LayerIndex
    weights_bytes: int
    decode: tuple[ChunkIndex, ...]
    read: tuple[ChunkIndex, ...]
    read_decode: tuple[ChunkIndex, ...]
    allocate: tuple[ChunkIndex, ...]
    forget: tuple[ChunkIndex, ...]

    @property
    def chunks(self) -> tuple[ChunkIndex, ...]:
        """All chunks that need memory, ascending: the restored ones, then the new ones."""
        return (*sorted((*self.decode, *self.read, *self.read_decode)), *self.allocate)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to bring back for one request.

    Attributes:
        layers: all of them, in forward order.
        head_bytes: of the head unit if it must be loaded (after the last layer), else 0.
        chunk_bytes: of every chunk.
    """

    context: str
    layers: tuple[LayerRestore, ...]
    head_bytes: int
    chunk_bytes: int

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Everything that needs memory, in the order of need: layer by layer, weights first; head last."""
        needs: list[Allocation] = []
        for layer in self.layers:
            if layer.weights_bytes:
                needs.append(Allocation(WeightUnit(layer.layer), layer.weights_bytes))
            needs.extend(
                Allocation(KvUnit(self.context, layer.layer, chunk), self.chunk_bytes)
                for chunk in layer.chunks
            )
        if self.head_bytes:
            needs.append(Allocation(HeadUnit(), self.head_bytes))
        return tuple(needs)

    @property
    def allocate_bytes(self) -> int:
        """Memory that must be found before payloads in RAM are given back."""
        layers_bytes = sum(
            layer.weights_bytes + len(layer.chunks) * self.chunk_bytes for layer in self.layers
        )
        return layers_bytes + self.head_bytes


def intact_tokens(context: ContextSnapshot, tokens: int) -> int:
    """How many of the first `tokens` still have their KV in every layer, wherever it lies."""
    absent = (context.states == UnitState.ABSENT).any(axis=0)
    num_chunks = int(np.argmax(absent)) if absent.any() else context.num_chunks
    return min(tokens, num_chunks * CHUNK_TOKENS)


def plan_restore(
    snapshot: MemorySnapshot, context_name: str, *, keep_tokens: int, capacity_tokens: int, need_head: bool
) -> RestorePlan:
    """Plan to make the first `keep_tokens` tokens of a context resident, and all weights.

    Args:
        keep_tokens: cached tokens that the request shares; chunks wholly behind them are forgotten.
        capacity_tokens: tokens that there must be room for in all, those to come included.
        need_head: whether logits are wanted (or the head embeds the tokens).

    Raises:
        KeyError: no such context.
        ValueError: `capacity_tokens` is less than `keep_tokens`.
        LostContentError: some of the kept tokens have no KV any more.
        UnsettledUnitError: work on a unit is in flight.
    """
    context = snapshot.context(context_name)
    if not 0 <= keep_tokens <= capacity_tokens:
        raise ValueError(f"{capacity_tokens} tokens of room cannot hold {keep_tokens}")
    if intact_tokens(context, keep_tokens) < keep_tokens:
        raise LostContentError(f"context {context_name} has lost some of its first {keep_tokens} tokens")
    _check_settled(snapshot, context)
    keep_chunks = _chunks_of(keep_tokens)
    capacity_chunks = _chunks_of(capacity_tokens)
    layers = tuple(
        _plan_layer(snapshot, context, LayerIndex(layer), keep_chunks, capacity_chunks)
        for layer in range(snapshot.weights.num_layers)
    )
    head = snapshot.head
    head_bytes = head.size_bytes if need_head and head.state is UnitState.DROPPED else 0
    return RestorePlan(context_name, layers, head_bytes, snapshot.kv_sizes.chunk_bytes)


def _chunks_of(tokens: int) -> int:
    return -(-tokens // CHUNK_TOKENS)


def _check_settled(snapshot: MemorySnapshot, context: ContextSnapshot) -> None:
    states = np.concatenate([snapshot.weights.states, [snapshot.head.state], context.states.ravel()])
    moving = np.setdiff1d(states, [state.value for state in SETTLED_STATES])
    if len(moving):
        names = ", ".join(UnitState(int(state)).name for state in moving)
        raise UnsettledUnitError(f"a restore cannot be planned over units that are {names}")


def _plan_layer(
    snapshot: MemorySnapshot,
    context: ContextSnapshot,
    layer: LayerIndex,
    keep_chunks: int,
    capacity_chunks: int,
) -> LayerRestore:
    weights = snapshot.weights
    is_dropped = weights.states[layer] == UnitState.DROPPED
    row = context.states[layer]
    kept = row[:keep_chunks]
    forget = _indices(row[keep_chunks:] != UnitState.ABSENT, keep_chunks)
    return LayerRestore(
        layer=layer,
        weights_bytes=int(weights.sizes_bytes[layer]) if is_dropped else 0,
        decode=_indices(kept == UnitState.COMPRESSED),
        read=_indices(kept == UnitState.STORED),
        read_decode=_indices(kept == UnitState.STORED_COMPRESSED),
        allocate=tuple(ChunkIndex(chunk) for chunk in range(keep_chunks, capacity_chunks)),
        forget=forget,
    )


def _indices(wanted: NDArray[np.bool_], first: int = 0) -> tuple[ChunkIndex, ...]:
    return tuple(ChunkIndex(int(chunk) + first) for chunk in np.flatnonzero(wanted))
