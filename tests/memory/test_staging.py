"""Staging slots: bounded, aligned, given back once, gone when trimmed."""

from itertools import pairwise

import pytest
import trio

from mzd import native
from mzd.memory.staging import StagingPool

SLOT = 4 * native.PAGE_BYTES


async def test_slots_are_whole_pages_apart_and_counted():
    pool = StagingPool(SLOT, 3)
    buffers = [await pool.acquire() for _ in range(3)]
    addresses = sorted(buffer.address for buffer in buffers)
    assert all(address % native.PAGE_BYTES == 0 for address in addresses)
    assert all(b - a >= SLOT for a, b in pairwise(addresses))
    assert pool.size_bytes == 3 * SLOT
    for buffer in buffers:
        native.fill(buffer.address, SLOT, 7)
        buffer.release()


async def test_the_next_one_waits_for_a_slot_and_gets_it(autojump_clock, nursery):
    pool = StagingPool(SLOT, 1)
    first = await pool.acquire()
    got = []

    async def wait():
        got.append(await pool.acquire())

    nursery.start_soon(wait)
    await trio.sleep(100)
    assert not got
    first.release()
    await trio.sleep(1)
    assert got[0].address == first.address
    assert pool.size_bytes == SLOT
    got[0].release()


async def test_one_that_gives_up_waiting_holds_nothing(autojump_clock):
    pool = StagingPool(SLOT, 1)
    first = await pool.acquire()
    with trio.move_on_after(1):
        await pool.acquire()
    first.release()
    with trio.fail_after(1):
        (await pool.acquire()).release()


async def test_a_second_release_is_a_broken_invariant():
    pool = StagingPool(SLOT, 2)
    buffer = await pool.acquire()
    buffer.release()
    with pytest.raises(RuntimeError, match="twice"):
        buffer.release()


async def test_trim_unmaps_free_slots_and_no_others():
    pool = StagingPool(SLOT, 2)
    held, free = await pool.acquire(), await pool.acquire()
    free.release()
    pool.trim()
    assert pool.size_bytes == SLOT
    native.fill(held.address, SLOT, 1)
    held.release()
    pool.trim()
    assert pool.size_bytes == 0
    (await pool.acquire()).release()


def test_a_slot_must_be_whole_pages():
    with pytest.raises(ValueError, match="whole pages"):
        StagingPool(SLOT + 1, 1)
