"""Owns the account of what a restore would cost on each of its two paths.

Whole picoseconds, because sums must come out the same however an eviction is cut into calls: a plan
recomputes the account from a snapshot, and a tie must not depend on how a float was added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mzd.policy.profile import UnitTimes
from mzd.policy.residency import UnitState
from mzd.policy.snapshot import ContextSnapshot, CopyKind, MemorySnapshot

_PS_PER_S = 10**12


@dataclass(frozen=True, slots=True)
class PathCosts:
    """Times of one restore step, in picoseconds.

    Attributes:
        decode_ps: decompress one chunk.
        read_ps: read one FP16 chunk.
        read_compressed_ps: read one payload.
        read_layer_ps: read each weight layer, in forward order.
        read_head_ps: read the head unit.
    """

    decode_ps: int
    read_ps: int
    read_compressed_ps: int
    read_layer_ps: tuple[int, ...]
    read_head_ps: int

    def stored_ps(self, copy: CopyKind) -> int:
        """What a chunk that goes to flash, or lies there as `copy`, adds to codec minus storage time."""
        if copy is CopyKind.STORED_COMPRESSED:
            return self.decode_ps - self.read_compressed_ps
        return -self.read_ps


def path_costs(snapshot: MemorySnapshot, times: UnitTimes) -> PathCosts:
    """Costs for a snapshot's sizes; `times.t_rw_s` is that of a layer of mean size."""
    sizes = snapshot.weights.sizes_bytes
    mean_bytes = float(sizes.mean()) if len(sizes) else 1.0
    per_weight_byte_s = times.t_rw_s / mean_bytes
    kv = snapshot.kv_sizes
    return PathCosts(
        decode_ps=_picoseconds(times.t_dkv_s),
        read_ps=_picoseconds(times.t_rkv_s),
        read_compressed_ps=_picoseconds(times.t_rkv_s * kv.compressed_bytes / kv.chunk_bytes),
        read_layer_ps=tuple(_picoseconds(int(size) * per_weight_byte_s) for size in sizes),
        read_head_ps=_picoseconds(snapshot.head.size_bytes * per_weight_byte_s),
    )


def _picoseconds(seconds: float) -> int:
    return max(1, round(seconds * _PS_PER_S))


@dataclass(frozen=True, slots=True)
class RestoreWork:
    """What restoring one context, with all weights, would take on each path, in picoseconds."""

    storage_ps: int
    codec_ps: int

    @property
    def balance_ps(self) -> int:
        """Codec time minus storage time; 0 is balanced."""
        return self.codec_ps - self.storage_ps


def weight_reload_ps(snapshot: MemorySnapshot, costs: PathCosts) -> int:
    """Storage time of all weight layers and the head that are dropped now."""
    states = snapshot.weights.states
    layers = sum(costs.read_layer_ps[i] for i in np.flatnonzero(states == UnitState.DROPPED))
    head = costs.read_head_ps if snapshot.head.state is UnitState.DROPPED else 0
    return layers + head


def restore_work(snapshot: MemorySnapshot, context: ContextSnapshot, costs: PathCosts) -> RestoreWork:
    """The two paths' times if `context` were asked for now; units on their way out count as out."""
    counts = np.bincount(context.states.ravel(), minlength=len(UnitState)).tolist()
    in_ram = counts[UnitState.COMPRESSED] + counts[UnitState.COMPRESSING]
    stored = counts[UnitState.STORED] + counts[UnitState.WRITING]
    payloads = counts[UnitState.STORED_COMPRESSED] + counts[UnitState.SPILLING]
    return RestoreWork(
        storage_ps=stored * costs.read_ps
        + payloads * costs.read_compressed_ps
        + weight_reload_ps(snapshot, costs),
        codec_ps=(in_ram + payloads) * costs.decode_ps,
    )
