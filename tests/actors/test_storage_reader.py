"""The reader on real files: what was read, what was damaged, and who holds the staging buffer then."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import trio

from mzd import native
from mzd.actors.storage_reader import StorageReader
from mzd.memory.staging import StagingPool
from mzd.memory.workers import Workers
from mzd.messages.restore_path import DecodeChunks, ReadUnits, UnitsFailed, UnitsRestored
from mzd.policy.units import HeadUnit, KvUnit, WeightUnit
from tests.actors.edges import HostMemory, InlineWorkers, addresses_of, is_closed

PAGE = native.PAGE_BYTES


class Reader:
    """One reader with its three channels, over a file of pages that each hold their number."""

    def __init__(self, path, workers=None, num_pages=4):
        content = np.repeat(np.arange(1, num_pages + 1, dtype=np.uint8), PAGE)
        path.write_bytes(content.tobytes())
        self.content = content.reshape(num_pages, PAGE)
        self.fd = os.open(path, os.O_RDONLY)
        self.to_reads, reads = trio.open_memory_channel(8)
        decodes, self.decodes = trio.open_memory_channel(8)
        facts, self.facts = trio.open_memory_channel(8)
        self.actor = StorageReader(HostMemory(), workers or Workers("read", 1), reads, decodes, facts)

    def read(self, into, units, pages, *, crc_errors=(), **more):
        """A message that reads `pages` into the arrays `into`."""
        crcs = [native.crc32c_buffer(self.content[page], 0) for page in pages]
        sizes = np.full(len(pages), PAGE, np.uint64)
        return ReadUnits(
            restore_id=5,
            layer=0,
            units=tuple(units),
            fd=self.fd,
            offsets=np.array([page * PAGE for page in pages], np.uint64),
            addresses=addresses_of(*into),
            sizes=sizes,
            crc_sizes=sizes,
            crc_seeds=np.zeros(len(pages), np.uint32),
            crcs=np.array([crc ^ (i in crc_errors) for i, crc in enumerate(crcs)], np.uint32),
            **more,
        )

    def close(self):
        os.close(self.fd)
        for channel in (self.to_reads, self.decodes, self.facts):
            channel.close()


@pytest.fixture
def reader(tmp_path):
    reader = Reader(tmp_path / "pages")
    yield reader
    reader.close()


@pytest.fixture
async def running(reader, nursery):
    nursery.start_soon(reader.actor.run)
    return reader


def chunks(count):
    return [KvUnit("c", 0, chunk) for chunk in range(count)]


async def test_extents_are_read_and_told(running):
    into = np.zeros((2, PAGE), np.uint8)
    await running.to_reads.send(running.read(into, chunks(2), [3, 1]))
    fact = await running.facts.receive()
    assert isinstance(fact, UnitsRestored)
    assert (fact.restore_id, fact.lane, fact.units, fact.size_bytes) == (
        5,
        "read",
        tuple(chunks(2)),
        2 * PAGE,
    )
    assert fact.start_ns <= fact.end_ns
    assert np.array_equal(into, running.content[[3, 1]])


async def test_a_wrong_checksum_fails_its_unit_alone(running):
    into = np.zeros((3, PAGE), np.uint8)
    await running.to_reads.send(running.read(into, chunks(3), [0, 1, 2], crc_errors=[1]))
    fact = await running.facts.receive()
    assert isinstance(fact, UnitsFailed)
    assert fact.units == (chunks(3)[1],)
    assert fact.restored == (chunks(3)[0], chunks(3)[2])
    assert fact.error.code == "corrupt_chunk"


@pytest.mark.parametrize("unit", [WeightUnit(0), HeadUnit()])
async def test_damaged_weights_are_unavailable(running, unit):
    into = np.zeros((1, PAGE), np.uint8)
    await running.to_reads.send(running.read(into, [unit], [0], crc_errors=[0]))
    fact = await running.facts.receive()
    assert (fact.units, fact.restored, fact.error.code) == ((unit,), (), "weights_unavailable")


async def test_a_read_past_the_end_is_a_failure_with_its_reason(running):
    into = np.zeros((1, PAGE), np.uint8)
    read = running.read(into, chunks(1), [0])
    read.offsets[0] = 99 * PAGE
    await running.to_reads.send(read)
    fact = await running.facts.receive()
    assert fact.units == tuple(chunks(1))
    assert str(native.EXTENT_SHORT) in fact.error.message


async def staged(reader, pool, crc_errors):
    """A read of two payloads into staging; the message and the arrays' stand-ins."""
    buffer = await pool.acquire()
    read = reader.read([], chunks(2), [0, 1], crc_errors=crc_errors, staging=buffer)
    into = np.array([buffer.address, buffer.address + PAGE], np.uint64)
    fields = {name: getattr(read, name) for name in read.__slots__}
    return ReadUnits(**(fields | {"addresses": into, "decode_addresses": np.array([11, 22], np.uint64)}))


@pytest.mark.parametrize(("crc_errors", "decoded"), [([], [0, 1]), ([0], [1])])
async def test_payloads_go_on_with_their_staging_buffer(running, crc_errors, decoded):
    pool = StagingPool(2 * PAGE, 1)
    await running.to_reads.send(await staged(running, pool, crc_errors))
    if crc_errors:
        fact = await running.facts.receive()
        assert (fact.units, fact.restored) == ((chunks(2)[0],), ())  # a payload read is no chunk restored
    batch = await running.decodes.receive()
    assert isinstance(batch, DecodeChunks)
    assert batch.units == tuple(chunks(2)[i] for i in decoded)
    assert batch.addresses.tolist() == [[11, 22][i] for i in decoded]
    assert len(batch.payloads) == len(decoded)
    batch.staging.release()
    pool.trim()
    assert pool.size_bytes == 0


async def test_where_no_payload_is_good_the_staging_buffer_is_given_back(running):
    pool = StagingPool(2 * PAGE, 1)
    await running.to_reads.send(await staged(running, pool, [0, 1]))
    fact = await running.facts.receive()
    assert fact.units == tuple(chunks(2))
    with trio.fail_after(5):
        (await pool.acquire()).release()


async def test_the_end_of_the_input_closes_both_outputs(reader):
    reader.to_reads.close()
    await reader.actor.run()
    assert is_closed(reader.decodes)
    assert is_closed(reader.facts)


@pytest.mark.parametrize("cancel_s", [0.0, 0.5, 1.5])
async def test_cancelled_it_holds_nothing(tmp_path, autojump_clock, cancel_s):
    """While it waits, while it reads, and while nobody takes the payloads."""
    reader = Reader(tmp_path / "pages", InlineWorkers(delay_s=1.0))
    reader.actor.decodes, reader.decodes = trio.open_memory_channel(0)
    pool = StagingPool(2 * PAGE, 1)
    await reader.to_reads.send(await staged(reader, pool, []))
    with trio.move_on_after(cancel_s):
        await reader.actor.run()
    assert is_closed(reader.decodes)
    assert is_closed(reader.facts)
    if cancel_s:
        with trio.fail_after(5):
            (await pool.acquire()).release()
    reader.close()


async def test_the_errors_of_the_kernel_are_named(running, monkeypatch):
    monkeypatch.setattr(native, "read_extents", lambda fd, offsets, *rest: [-errno.EIO] * len(offsets))
    into = np.zeros((1, PAGE), np.uint8)
    await running.to_reads.send(running.read(into, chunks(1), [0]))
    fact = await running.facts.receive()
    assert str(-errno.EIO) in fact.error.message
