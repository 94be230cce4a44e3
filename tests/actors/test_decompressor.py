"""The decompressor: chunks come out of payloads; the staging buffer is back before anybody hears of it."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from mzd.actors.decompressor import Decompressor
from mzd.codec import codec_by_name
from mzd.memory.staging import StagingPool
from mzd.memory.workers import Workers
from mzd.messages.restore_path import DecodeChunks
from mzd.policy.units import PAGE_BYTES, KvUnit
from tests.actors.edges import HostMemory, InlineWorkers, addresses_of, is_closed

CHUNK_BYTES = 4096


class Decoding:
    """One decompressor with its channels."""

    def __init__(self, codec, workers):
        self.to_decodes, decodes = trio.open_memory_channel(4)
        facts, self.facts = trio.open_memory_channel(0)
        self.actor = Decompressor(HostMemory(), codec, CHUNK_BYTES, workers, decodes, facts)


def batch_of(payloads, chunks, staging=None):
    units = tuple(KvUnit("c", 2, chunk) for chunk in range(len(chunks)))
    return DecodeChunks(3, 2, units, addresses_of(*payloads), addresses_of(*chunks), staging)


@pytest.mark.parametrize("name", ["int8", "none"])
async def test_payloads_become_chunks(nursery, name):
    codec = codec_by_name(name)
    chunks = np.random.default_rng(1).standard_normal((3, CHUNK_BYTES // 2)).astype(np.float16)
    payloads = np.zeros((3, codec.payload_bytes(CHUNK_BYTES)), np.uint8)
    codec.encode_batch(addresses_of(*chunks), addresses_of(*payloads), CHUNK_BYTES)
    found = np.zeros_like(chunks)
    decoding = Decoding(codec, Workers("decompress", 2))
    nursery.start_soon(decoding.actor.run)
    await decoding.to_decodes.send(batch_of(payloads, found))
    fact = await decoding.facts.receive()
    assert (fact.restore_id, fact.lane, fact.layer) == (3, "decompress", 2)
    assert [unit.chunk for unit in fact.units] == [0, 1, 2]
    assert fact.size_bytes == 3 * CHUNK_BYTES
    assert np.abs(found.astype(np.float32) - chunks).max() <= (0 if codec.exact else 0.04)


class SlowCodec:
    """Decodes nothing; says when it was asked."""

    def __init__(self, error=None):
        self.error = error

    def decode_batch(self, payloads, addresses, chunk_bytes):
        if self.error is not None:
            raise self.error


async def test_staging_is_back_when_the_fact_is_out(nursery):
    pool = StagingPool(PAGE_BYTES, 1)
    decoding = Decoding(SlowCodec(), InlineWorkers())
    nursery.start_soon(decoding.actor.run)
    await decoding.to_decodes.send(batch_of([], [], await pool.acquire()))
    await decoding.facts.receive()
    pool.trim()
    assert pool.size_bytes == 0


async def test_a_codec_that_fails_ends_the_actor_and_gives_staging_back():
    pool = StagingPool(PAGE_BYTES, 1)
    decoding = Decoding(SlowCodec(ValueError("planted")), InlineWorkers())
    await decoding.to_decodes.send(batch_of([], [], await pool.acquire()))
    with pytest.raises(ValueError, match="planted"):
        await decoding.actor.run()
    (await pool.acquire()).release()
    assert is_closed(decoding.facts)


@pytest.mark.parametrize("cancel_s", [0.5, 1.5])
async def test_cancelled_it_holds_nothing(autojump_clock, cancel_s):
    """While it decodes, and while nobody takes the fact."""
    pool = StagingPool(PAGE_BYTES, 1)
    decoding = Decoding(SlowCodec(), InlineWorkers(delay_s=1.0))
    await decoding.to_decodes.send(batch_of([], [], await pool.acquire()))
    with trio.move_on_after(cancel_s):
        await decoding.actor.run()
    (await pool.acquire()).release()
    assert is_closed(decoding.facts)


async def test_the_end_of_the_input_is_the_end():
    decoding = Decoding(SlowCodec(), InlineWorkers())
    decoding.to_decodes.close()
    await decoding.actor.run()
    assert is_closed(decoding.facts)
