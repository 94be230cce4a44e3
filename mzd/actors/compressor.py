"""Owns encoding: chunks become payloads in the in-memory swap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import trio

from mzd.codec import Codec
from mzd.memory.backend import MemoryBackend
from mzd.memory.workers import Workers
from mzd.messages.evict_path import ChunksCompressed, CompressChunks, EvictFact


@dataclass(slots=True)
class Compressor:
    """Evict path, step 2 for what stays in RAM.

    Where a chunk's pages are our own they go as soon as its payload stands, so a batch never needs more than
    one payload of memory above what it found. Cancelled: the batch in flight ends first, and the output is
    closed.
    """

    memory: MemoryBackend
    codec: Codec
    workers: Workers
    chunks: trio.MemoryReceiveChannel[CompressChunks]
    facts: trio.MemorySendChannel[EvictFact]

    async def run(self) -> None:
        """Serve batches until the allocator closes its end."""
        async with self.chunks, self.facts:
            async for batch in self.chunks:
                encoded = await self.workers.run(self._encode, batch)
                await self.facts.send(ChunksCompressed(batch.batch_id, tuple(encoded)))

    def _encode(self, batch: CompressChunks) -> list[bool]:
        """Runs in a thread, without the GIL."""
        size = batch.chunk_bytes
        if self.memory.gives_pages_back:
            return self.codec.encode_release_batch(batch.addresses, batch.payloads, size, size)
        sizes = np.full(len(batch.addresses), size, np.uint64)
        with self.memory.reading(batch.addresses, sizes) as host:
            return self.codec.encode_batch(host, batch.payloads, size)
