"""Owns the messages of the restore path, in the order in which they travel.

    daemon/generation -> RestoreContext -> actors/allocator
    allocator         -> ReadUnits      -> actors/storage_reader
    allocator         -> DecodeChunks   -> actors/decompressor   (chunks compressed in RAM)
    storage_reader    -> DecodeChunks   -> actors/decompressor   (chunks compressed on flash)
    reader, decompr.  -> UnitsRestored | UnitsFailed -> allocator
    allocator         -> LayerReady | HeadReady | RestoreFailed -> actors/gpu_prefill

A message is a batch: the units of one layer that travel one way together. A thread hop a unit
would cost more than decoding a small unit does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError
from mzd.memory.staging import StagingBuffer
from mzd.memory.swap_file import StoredChunk
from mzd.messages.reply import Reply
from mzd.policy.units import LayerIndex, UnitId

Addresses = NDArray[np.uint64]


class OverlapMode(Enum):
    """What may overlap in a restore; all but `ARP` exist for measurement (paper, 6.4)."""

    NO = "mz_NO"
    AR = "mz_AR"
    RP = "mz_RP"
    ARP = "mz_ARP"

    @property
    def allocates_ahead(self) -> bool:
        """Allocation runs beside reads and decoding."""
        return self in (OverlapMode.AR, OverlapMode.ARP)

    @property
    def prefills_ahead(self) -> bool:
        """Prefill starts on the first ready layer."""
        return self in (OverlapMode.RP, OverlapMode.ARP)


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """What one restore did."""

    restore_id: int
    restored_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class RestoreReplies:
    """`planned`: bytes that must come back; `outcome`: answered when the last unit is resident."""

    planned: Reply[int]
    outcome: Reply[RestoreOutcome]


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """Make a context and the weights resident, and protect them until `FinishUse`.

    `keep_tokens` cached tokens stay; KV behind them is dropped, not restored. Room is made for
    `capacity_tokens` tokens in all. With `announce`, gpu_prefill gets the readiness events.
    """

    restore_id: int
    context: str
    keep_tokens: int
    capacity_tokens: int
    announce: bool
    replies: RestoreReplies


@dataclass(frozen=True, slots=True)
class AbandonRestore:
    """Nobody waits for this restore any more: dispatch no further layer of it."""

    restore_id: int


@dataclass(frozen=True, slots=True)
class FinishUse:
    """The request is over: `tokens` are the ids whose KV is now computed; protection ends."""

    context: str
    tokens: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ReadUnits:
    """Read extents of one file into memory that the allocator has populated.

    `crc_seeds` and `crcs` check content and place. With `staging`, the addresses lie in it and
    what was read are payloads: they go on to the decompressor for `decode_addresses`, and the
    staging buffer goes with them. `holds` keeps the files open until the read has ended.
    """

    restore_id: int
    layer: LayerIndex | None
    units: tuple[UnitId, ...]
    fd: int
    offsets: NDArray[np.uint64]
    addresses: Addresses
    sizes: NDArray[np.uint64]
    crc_sizes: NDArray[np.uint64]
    crc_seeds: NDArray[np.uint32]
    crcs: NDArray[np.uint32]
    holds: tuple[StoredChunk, ...] = ()
    staging: StagingBuffer | None = None
    decode_addresses: Addresses | None = None


@dataclass(frozen=True, slots=True)
class DecodeChunks:
    """Decode payloads into resident-to-be chunks of one layer; owns `staging` if there is one."""

    restore_id: int
    layer: LayerIndex
    units: tuple[UnitId, ...]
    payloads: Addresses
    addresses: Addresses
    staging: StagingBuffer | None = None


@dataclass(frozen=True, slots=True)
class UnitsRestored:
    """These units hold their content. `start_ns` and `end_ns`: monotonic, of the work itself."""

    restore_id: int
    lane: str
    layer: LayerIndex | None
    units: tuple[UnitId, ...]
    size_bytes: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class UnitsFailed:
    """These units could not be brought back; the rest of their batch was."""

    restore_id: int
    layer: LayerIndex | None
    units: tuple[UnitId, ...]
    restored: tuple[UnitId, ...]
    error: MzdError


@dataclass(frozen=True, slots=True)
class LayerReady:
    """A layer's weights and chunks are resident and protected: kernels may read them."""

    restore_id: int
    layer: LayerIndex
    weights_address: int
    chunk_addresses: Addresses = field(repr=False)


@dataclass(frozen=True, slots=True)
class HeadReady:
    """The head unit is resident and protected."""

    restore_id: int
    address: int


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """No further layer of this restore becomes ready."""

    restore_id: int
    error: MzdError


Readiness = LayerReady | HeadReady | RestoreFailed
RestoreFact = UnitsRestored | UnitsFailed
