"""Owns snapshots for tests: builders, a hypothesis strategy, and what happens when a plan is carried out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from mzd.policy.eviction_planner import Destination, Stage, Step
from mzd.policy.profile import UnitTimes
from mzd.policy.residency import UnitState
from mzd.policy.snapshot import (
    ContextSnapshot,
    CopyKind,
    HeadSnapshot,
    KvSizes,
    MemorySnapshot,
    WeightsSnapshot,
)
from mzd.policy.units import HeadUnit, KvUnit, WeightUnit

KIB = 1024
MIB = 1024 * KIB
UNLIMITED = 1 << 60


def context_of(name, num_layers, num_chunks, *, state=UnitState.RESIDENT, copy=CopyKind.NONE, pinned=False):
    shape = (num_layers, num_chunks)
    return ContextSnapshot(
        context=name,
        states=np.full(shape, state, np.uint8),
        copies=np.full(shape, copy, np.uint8),
        protected=np.zeros(shape, np.bool_),
        incompressible=np.zeros(shape, np.bool_),
        pinned=pinned,
    )


def weights_of(num_layers, layer_bytes, state=UnitState.RESIDENT):
    return WeightsSnapshot(
        sizes_bytes=np.full(num_layers, layer_bytes, np.int64),
        states=np.full(num_layers, state, np.uint8),
        protected=np.zeros(num_layers, np.bool_),
    )


def snapshot_of(
    *contexts,
    num_layers,
    layer_bytes=4 * MIB,
    head_bytes=0,
    chunk_bytes=MIB,
    saving=0.46875,
    storage_left_bytes=UNLIMITED,
):
    """All weights resident; no head unless `head_bytes`."""
    compressed_bytes = round(chunk_bytes * (1 - saving))
    return MemorySnapshot(
        weights=weights_of(num_layers, layer_bytes),
        head=HeadSnapshot(head_bytes, UnitState.RESIDENT, protected=head_bytes == 0),
        contexts=contexts,
        kv_sizes=KvSizes(chunk_bytes, compressed_bytes, chunk_bytes, compressed_bytes),
        storage_left_bytes=storage_left_bytes,
    )


def carry_out(snapshot: MemorySnapshot, steps: tuple[Step, ...]) -> MemorySnapshot:
    """The snapshot after `steps`; asserts that each step's unit is where the step takes it from."""
    weights_states = snapshot.weights.states.copy()
    states = {c.context: c.states.copy() for c in snapshot.contexts}
    copies = {c.context: c.copies.copy() for c in snapshot.contexts}
    head = snapshot.head
    left = snapshot.storage_left_bytes
    for step in steps:
        match step.unit:
            case HeadUnit():
                assert head.state is UnitState.RESIDENT
                head = replace(head, state=UnitState.DROPPED)
            case WeightUnit(layer):
                assert weights_states[layer] == UnitState.RESIDENT
                weights_states[layer] = UnitState.DROPPED
            case KvUnit(name, layer, chunk):
                at = (layer, chunk)
                left -= _carry_out_kv(snapshot.kv_sizes, step, states[name], copies[name], at)
    assert left >= 0
    return replace(
        snapshot,
        weights=replace(snapshot.weights, states=weights_states),
        head=head,
        contexts=tuple(
            replace(c, states=states[c.context], copies=copies[c.context]) for c in snapshot.contexts
        ),
        storage_left_bytes=left,
    )


def _carry_out_kv(sizes: KvSizes, step: Step, states, copies, at) -> int:
    """Changes the two arrays; returns the bytes that flash takes."""
    spilled = step.stage is Stage.COMP_KV
    assert states[at] == (UnitState.COMPRESSED if spilled else UnitState.RESIDENT)
    if step.to is Destination.RAM:
        states[at] = UnitState.COMPRESSED
        return 0
    if step.to is Destination.DROPPED:
        assert copies[at] != CopyKind.NONE
        stored = copies[at] == CopyKind.STORED
        states[at] = UnitState.STORED if stored else UnitState.STORED_COMPRESSED
        return 0
    assert copies[at] == CopyKind.NONE
    states[at] = UnitState.STORED_COMPRESSED if spilled else UnitState.STORED
    copies[at] = CopyKind.STORED_COMPRESSED if spilled else CopyKind.STORED
    return sizes.compressed_slot_bytes if spilled else sizes.slot_bytes


def resident_bytes(snapshot: MemorySnapshot) -> int:
    """Bytes that units hold in RAM, payloads included; counted one by one."""
    weights = sum(
        int(size)
        for size, state in zip(snapshot.weights.sizes_bytes, snapshot.weights.states, strict=True)
        if state == UnitState.RESIDENT
    )
    head = snapshot.head.size_bytes if snapshot.head.state is UnitState.RESIDENT else 0
    kv = 0
    for context in snapshot.contexts:
        kv += int((context.states == UnitState.RESIDENT).sum()) * snapshot.kv_sizes.chunk_bytes
        kv += int((context.states == UnitState.COMPRESSED).sum()) * snapshot.kv_sizes.compressed_bytes
    return weights + head + kv


def restore_seconds(snapshot: MemorySnapshot, name: str, times: UnitTimes) -> tuple[float, float]:
    """(storage, codec) seconds to bring one context and all weights back, straight from the definition."""
    context = snapshot.context(name)
    sizes = snapshot.kv_sizes
    mean = float(snapshot.weights.sizes_bytes.mean())
    dropped = snapshot.weights.states == UnitState.DROPPED
    weight_bytes = float(snapshot.weights.sizes_bytes[dropped].sum())
    if snapshot.head.state is UnitState.DROPPED:
        weight_bytes += snapshot.head.size_bytes
    stored = int((context.states == UnitState.STORED).sum())
    payloads = int((context.states == UnitState.STORED_COMPRESSED).sum())
    compressed = int((context.states == UnitState.COMPRESSED).sum())
    share = sizes.compressed_bytes / sizes.chunk_bytes
    storage_s = stored * times.t_rkv_s + payloads * times.t_rkv_s * share + weight_bytes / mean * times.t_rw_s
    return storage_s, (compressed + payloads) * times.t_dkv_s


_SETTLED_KV = (
    UnitState.ABSENT,
    UnitState.RESIDENT,
    UnitState.COMPRESSED,
    UnitState.STORED,
    UnitState.STORED_COMPRESSED,
)


@st.composite
def contexts(draw, name, num_layers):
    shape = (num_layers, draw(st.integers(0, 4)))
    count = shape[0] * shape[1]

    def grid(values, dtype):
        return np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype).reshape(shape)

    states = grid(st.sampled_from(_SETTLED_KV), np.uint8)
    copies = grid(st.sampled_from(list(CopyKind)), np.uint8)
    copies[states == UnitState.STORED] = CopyKind.STORED
    copies[states == UnitState.STORED_COMPRESSED] = CopyKind.STORED_COMPRESSED
    copies[states == UnitState.ABSENT] = CopyKind.NONE
    return ContextSnapshot(
        context=name,
        states=states,
        copies=copies,
        protected=grid(st.booleans(), np.bool_) if draw(st.booleans()) else np.zeros(shape, np.bool_),
        incompressible=grid(st.booleans(), np.bool_) if draw(st.booleans()) else np.zeros(shape, np.bool_),
        pinned=draw(st.integers(0, 5)) == 0,
    )


@st.composite
def snapshots(draw):
    """Any settled state of a small model with up to three contexts."""
    num_layers = draw(st.integers(1, 5))
    names = ("a", "b", "c")[: draw(st.integers(0, 3))]
    chunk_bytes = draw(st.integers(2, 64)) * KIB
    compressed_bytes = draw(st.integers(1, chunk_bytes))
    layers = st.lists(st.booleans(), min_size=num_layers, max_size=num_layers)
    sizes = st.lists(st.integers(1, 512 * KIB), min_size=num_layers, max_size=num_layers)
    weight_states = st.lists(
        st.sampled_from((UnitState.RESIDENT, UnitState.DROPPED)), min_size=num_layers, max_size=num_layers
    )
    return MemorySnapshot(
        weights=WeightsSnapshot(
            sizes_bytes=np.array(draw(sizes), np.int64),
            states=np.array(draw(weight_states), np.uint8),
            protected=np.array(draw(layers)),
        ),
        head=HeadSnapshot(
            draw(st.integers(1, MIB)),
            draw(st.sampled_from((UnitState.RESIDENT, UnitState.DROPPED))),
            draw(st.booleans()),
        ),
        contexts=tuple(draw(contexts(name, num_layers)) for name in names),
        kv_sizes=KvSizes(chunk_bytes, compressed_bytes, chunk_bytes, compressed_bytes),
        storage_left_bytes=draw(st.sampled_from((0, chunk_bytes, 3 * chunk_bytes + 1, UNLIMITED))),
    )


unit_times = st.builds(
    UnitTimes,
    t_dkv_s=st.floats(1e-6, 1e-2),
    t_rkv_s=st.floats(1e-6, 1e-2),
    t_rw_s=st.floats(1e-6, 1e-1),
)
