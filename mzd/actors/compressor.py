"""Owns encoding: chunks become payloads in the in-memory swap."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from mzd.codec import Codec
from mzd.memory.workers import Workers
from mzd.messages.evict_path import ChunksCompressed, CompressChunks, EvictFact


@dataclass(slots=True)
class Compressor:
    """Evict path, step 2 for what stays in RAM.

    Each chunk's pages go as soon as its payload stands, so a batch never needs more than one payload of
    memory above what it found. Cancelled: the batch in flight ends first, the output is closed.
    """

    codec: Codec
    workers: Workers
    chunks: trio.MemoryReceiveChannel[CompressChunks]
    facts: trio.MemorySendChannel[EvictFact]

    async def run(self) -> None:
        """Serve batches until the allocator closes its end."""
        async with self.chunks, self.facts:
            async for batch in self.chunks:
                encoded = await self.workers.run(
                    self.codec.encode_release_batch,
                    batch.addresses,
                    batch.payloads,
                    batch.chunk_bytes,
                    batch.chunk_bytes,
                )
                await self.facts.send(ChunksCompressed(batch.batch_id, tuple(encoded)))
