"""Owns the messages of the evict path.

rpc, actors/pressure_monitor -> Evict -> actors/allocator (policy/eviction_planner)
allocator  -> CompressChunks -> actors/compressor
allocator  -> WriteChunks    -> actors/storage_writer, only for KV not yet on flash
compressor -> ChunksCompressed -> allocator
writer     -> ChunksWritten    -> allocator
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError
from mzd.memory.swap_file import SlotWrite
from mzd.messages.reply import Reply


@dataclass(frozen=True, slots=True)
class EvictOutcome:
    """What an eviction did; field by field the answer of the RPC method `evict`."""

    requested_bytes: int
    freed_bytes: int
    resident_bytes: int
    exhausted: bool
    warnings: tuple[str, ...]
    steps: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """Free at least `goal_bytes`; `reason` goes to the log. `context` limits it to one context's KV."""

    goal_bytes: int
    reason: str
    dry_run: bool
    context: str | None
    reply: Reply[EvictOutcome]


@dataclass(frozen=True, slots=True)
class DropContext:
    """Forget a context's KV in RAM and on flash; the answer says whether there was one."""

    context: str
    reply: Reply[bool]


@dataclass(frozen=True, slots=True)
class CompressChunks:
    """Encode chunks into the in-memory swap; each chunk's pages go as soon as it is encoded.

    The compressor owns the chunks' memory from `send` on; afterwards it is unpopulated.
    """

    batch_id: int
    addresses: NDArray[np.uint64]
    payloads: NDArray[np.uint64]
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class ChunksCompressed:
    """`encoded[i]` is False where a chunk holds Inf or NaN: it is untouched and still resident."""

    batch_id: int
    encoded: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WriteChunks:
    """Write chunks, or their payloads, to their slots of one context's swap file."""

    batch_id: int
    addresses: tuple[int, ...]
    writes: tuple[SlotWrite, ...]


@dataclass(frozen=True, slots=True)
class ChunksWritten:
    """`crcs[i]` of a written chunk; `errors[i]` is None where the write succeeded."""

    batch_id: int
    crcs: tuple[int, ...]
    errors: tuple[MzdError | None, ...]


EvictFact = ChunksCompressed | ChunksWritten
