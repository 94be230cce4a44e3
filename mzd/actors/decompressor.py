"""Owns decoding: payloads become chunks in memory that the allocator has populated."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import trio

from mzd.codec import Codec
from mzd.memory.backend import MemoryBackend
from mzd.memory.workers import Workers
from mzd.messages.restore_path import DecodeChunks, RestoreFact, UnitsRestored


@dataclass(slots=True)
class Decompressor:
    """Restore path, step 3. Several of these share one input.

    Cancelled: the decode in flight ends first, a staging buffer in hand is given back, the output is closed.
    """

    memory: MemoryBackend
    codec: Codec
    chunk_bytes: int
    workers: Workers
    decodes: trio.MemoryReceiveChannel[DecodeChunks]
    facts: trio.MemorySendChannel[RestoreFact]

    async def run(self) -> None:
        """Serve payloads until the allocator and every reader have closed their ends."""
        async with self.decodes, self.facts:
            async for batch in self.decodes:
                await self._serve(batch)

    async def _serve(self, batch: DecodeChunks) -> None:
        try:
            start_ns = time.monotonic_ns()
            await self.workers.run(self._decode, batch)
            end_ns = time.monotonic_ns()
        finally:
            if batch.staging is not None:
                batch.staging.release()
        size_bytes = self.chunk_bytes * len(batch.units)
        await self.facts.send(
            UnitsRestored(
                batch.restore_id, "decompress", batch.layer, batch.units, size_bytes, start_ns, end_ns
            )
        )

    def _decode(self, batch: DecodeChunks) -> None:
        """Runs in a thread, without the GIL."""
        sizes = np.full(len(batch.units), self.chunk_bytes, np.uint64)
        with self.memory.writing(batch.addresses, sizes) as host:
            self.codec.decode_batch(batch.payloads, host, self.chunk_bytes)
