"""Owns the writes of an eviction: chunks and payloads to their slots on flash."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

import numpy as np
import trio

from mzd import native
from mzd.errors import MzdError
from mzd.memory.backend import MemoryBackend
from mzd.memory.workers import Workers
from mzd.messages.evict_path import ChunksWritten, EvictFact, WriteChunks


@dataclass(slots=True)
class StorageWriter:
    """Evict path, step 2 for what goes to flash.

    Cancelled: the write in flight ends first; its slots have no record yet, so a half-written chunk
    is never found again.
    """

    memory: MemoryBackend
    workers: Workers
    writes: trio.MemoryReceiveChannel[WriteChunks]
    facts: trio.MemorySendChannel[EvictFact]

    async def run(self) -> None:
        """Serve batches until the allocator closes its end."""
        async with self.writes, self.facts:
            async for batch in self.writes:
                await self.facts.send(await self.workers.run(_checksum_and_write, self.memory, batch))


def _checksum_and_write(memory: MemoryBackend, batch: WriteChunks) -> ChunksWritten:
    """Runs in a thread; the checksum is taken from memory, so that a bad write shows at the read."""
    offsets = np.array([write.offset_bytes for write in batch.writes], np.uint64)
    sizes = np.array([write.size_bytes for write in batch.writes], np.uint64)
    with memory.reading(np.array(batch.addresses, np.uint64), sizes) as host:
        addresses = host.tolist()
        crcs = [write.checksum(address) for write, address in zip(batch.writes, addresses, strict=True)]
        results = native.write_extents(batch.writes[0].fd, offsets, host, sizes)
    return ChunksWritten(batch.batch_id, tuple(crcs), tuple(_write_error(int(code)) for code in results))


def _write_error(code: int) -> MzdError | None:
    if code == 0:
        return None
    if -code in (errno.ENOSPC, errno.EDQUOT):
        return MzdError("swap_full", "no space is left where the storage swap lies", errno=-code)
    reason = os.strerror(-code) if code < 0 else "short write"
    return MzdError("internal", f"the storage swap cannot be written: {reason}", errno=-code)
