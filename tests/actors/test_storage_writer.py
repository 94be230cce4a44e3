"""The writer: content and checksums reach the file, and every failure is told by its code."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import trio

from mzd import native
from mzd.actors.storage_writer import StorageWriter
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.swap_file import NewChunk
from mzd.memory.workers import Workers
from mzd.messages.evict_path import WriteChunks
from mzd.policy.units import KvUnit
from tests.actors.edges import HostMemory, InlineWorkers, is_closed

CHUNK_BYTES = 2 * native.PAGE_BYTES


@pytest.fixture
def swap(tmp_path):
    contexts = ContextDirectory(tmp_path / "contexts")
    yield StorageSwap(contexts, model_id="0" * 64, quota_bytes=1 << 30)
    contexts.close()


def batch_of(swap, chunks, batch_id=0):
    """A message that writes rows of `chunks` (page-aligned uint8) to fresh slots."""
    new = [
        NewChunk(KvUnit("c", 0, i), 256, bytes(16), "none", 1, CHUNK_BYTES, CHUNK_BYTES)
        for i in range(len(chunks))
    ]
    writes = tuple(swap.allocate(new))
    return WriteChunks(batch_id, tuple(row.ctypes.data for row in chunks), writes)


def aligned_rows(count):
    """(count, CHUNK_BYTES) uint8 that begins on a page, as direct I/O wants it."""
    raw = np.random.default_rng(3).integers(0, 256, count * CHUNK_BYTES + native.PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % native.PAGE_BYTES
    return raw[start : start + count * CHUNK_BYTES].reshape(count, CHUNK_BYTES)


async def written(swap, batch):
    """What one writer tells of one batch."""
    to_writes, writes = trio.open_memory_channel(1)
    facts, received = trio.open_memory_channel(1)
    await to_writes.send(batch)
    to_writes.close()
    await StorageWriter(HostMemory(), Workers("write", 1), writes, facts).run()
    fact = received.receive_nowait()
    assert is_closed(received)
    return fact


async def test_what_is_written_can_be_read_by_its_record(swap):
    rows = aligned_rows(3)
    batch = batch_of(swap, rows, batch_id=8)
    fact = await written(swap, batch)
    assert (fact.batch_id, fact.errors) == (8, (None,) * 3)
    swap.commit(list(zip(batch.writes, fact.crcs, strict=True)))
    found = aligned_rows(1)[0]
    for i in range(3):
        stored = swap.locate(KvUnit("c", 0, i))
        places = (np.array([v], np.uint64) for v in (stored.offset_bytes, found.ctypes.data, CHUNK_BYTES))
        assert list(native.read_extents(stored.fd, *places)) == [0]
        assert stored.is_intact(found.ctypes.data)
        assert np.array_equal(found, rows[i])


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (-errno.ENOSPC, "swap_full"),
        (-errno.EDQUOT, "swap_full"),
        (-errno.EIO, "internal"),
        (native.EXTENT_SHORT, "internal"),
    ],
)
async def test_a_failure_is_told_by_its_code_for_its_chunk(swap, monkeypatch, result, code):
    monkeypatch.setattr(native, "write_extents", lambda *args: np.array([0, result]))
    fact = await written(swap, batch_of(swap, aligned_rows(2)))
    assert fact.errors[0] is None
    assert fact.errors[1].code == code


async def test_cancelled_the_write_in_flight_ends_first(swap, autojump_clock, monkeypatch):
    done = []
    monkeypatch.setattr(native, "write_extents", lambda *args: done.append(1) or np.array([0]))
    to_writes, writes = trio.open_memory_channel(1)
    facts, received = trio.open_memory_channel(1)
    await to_writes.send(batch_of(swap, aligned_rows(1)))
    with trio.move_on_after(0.5):
        await StorageWriter(HostMemory(), InlineWorkers(delay_s=1.0), writes, facts).run()
    assert done == [1]
    assert is_closed(received)
