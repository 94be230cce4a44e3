"""The compressor: payloads stand, pages are gone, and what the codec refuses is untouched."""

from __future__ import annotations

import mmap

import numpy as np
import trio

from mzd import native
from mzd.actors.compressor import Compressor
from mzd.codec import codec_by_name
from mzd.memory.workers import Workers
from mzd.messages.evict_path import CompressChunks
from tests.actors.edges import HostMemory, InlineWorkers, addresses_of, is_closed

CHUNK_BYTES = 4 * native.PAGE_BYTES


def mapped_chunks(values):
    """Each row of `values` (float16) in whole pages of its own: (mapping, view)."""
    mapping = mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(mapping, np.float16).reshape(values.shape)
    view[:] = values
    return mapping, view


async def test_encoded_chunks_leave_memory_and_refused_ones_stay(nursery):
    codec = codec_by_name("int8")
    values = np.random.default_rng(2).standard_normal((3, CHUNK_BYTES // 2)).astype(np.float16)
    values[1, 7] = np.inf
    _, chunks = mapped_chunks(values)
    payloads = np.zeros((3, codec.payload_bytes(CHUNK_BYTES)), np.uint8)
    to_chunks, batches = trio.open_memory_channel(1)
    facts, received = trio.open_memory_channel(1)
    nursery.start_soon(Compressor(HostMemory(), codec, Workers("compress", 1), batches, facts).run)
    await to_chunks.send(CompressChunks(4, addresses_of(*chunks), addresses_of(*payloads), CHUNK_BYTES))
    fact = await received.receive()
    assert (fact.batch_id, fact.encoded) == (4, (True, False, True))
    resident = [native.resident_bytes(chunk.ctypes.data, CHUNK_BYTES) for chunk in chunks]
    assert resident == [0, CHUNK_BYTES, 0]
    assert np.array_equal(chunks[1].view(np.uint16), values[1].view(np.uint16))
    decoded = np.zeros_like(values)
    codec.decode_batch(addresses_of(payloads[0]), addresses_of(decoded[0]), CHUNK_BYTES)
    assert np.abs(decoded[0].astype(np.float32) - values[0]).max() < 0.04


class CountingCodec:
    """Encodes nothing; counts."""

    def __init__(self):
        self.done = 0

    def encode_release_batch(self, src_addresses, dst_addresses, chunk_bytes, release_bytes):
        self.done += 1
        return [True]


async def test_cancelled_the_batch_in_flight_ends_first(autojump_clock):
    codec = CountingCodec()
    to_chunks, batches = trio.open_memory_channel(1)
    facts, received = trio.open_memory_channel(1)
    one = np.zeros(1, np.uint64)
    await to_chunks.send(CompressChunks(0, one, one, CHUNK_BYTES))
    with trio.move_on_after(0.5):
        await Compressor(HostMemory(), codec, InlineWorkers(delay_s=1.0), batches, facts).run()
    assert codec.done == 1
    assert is_closed(received)
    assert is_closed(to_chunks)
