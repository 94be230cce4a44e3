"""The allocator with all other actors played by the test, in virtual time: order, refusals, its books."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.actors.allocator import Allocator, AllocatorSettings
from mzd.actors.evict_operation import EvictEnds, EvictParts
from mzd.actors.restore_operation import RestoreEnds, RestoreParts
from mzd.errors import MzdError
from mzd.memory.in_memory_swap import InMemorySwap
from mzd.memory.unit_table import UnitTable
from mzd.messages.evict_path import ChunksCompressed, ChunksWritten, DropContext, Evict
from mzd.messages.reply import Reply
from mzd.messages.restore_path import (
    AbandonRestore,
    FinishUse,
    HeadReady,
    LayerReady,
    OverlapMode,
    RestoreContext,
    RestoreFailed,
    RestoreReplies,
    UnitsFailed,
    UnitsRestored,
)
from mzd.policy.eviction_planner import Order
from mzd.policy.pressure import MemoryRoom
from mzd.policy.profile import UnitTimes
from mzd.policy.residency import SETTLED_STATES, UnitState
from mzd.policy.snapshot import KvSizes
from mzd.policy.units import KvUnit
from tests.actors.edges import FakeMemory, FakeStorage, InlineWorkers, is_closed
from tests.paths.invariants import check_cache

LAYERS = 3
UNIT_BYTES = 8192
SIZES = KvSizes(UNIT_BYTES, UNIT_BYTES // 2, UNIT_BYTES, UNIT_BYTES // 2)
STUCK_S = 1000.0


class FakeStaging:
    """As many buffers as anybody wants; counts those that are out."""

    slot_bytes = 2 * UNIT_BYTES

    def __init__(self):
        self.out = 0

    async def acquire(self):
        await trio.lowlevel.checkpoint()
        self.out += 1
        return SimpleNamespace(address=1 << 50, release=self.release)

    def release(self):
        self.out -= 1

    def trim(self):
        """Nothing is mapped."""


class World:
    """An allocator, and the actors around it, played by tasks that take random times and sometimes fail."""

    def __init__(self, rng=None, *, failures=0.0, delay_s=1.0, overlap=OverlapMode.ARP, available=None):
        self.rng = rng or random.Random(0)
        self.failures = failures
        self.delay_s = delay_s
        self.available = available if available is not None else [1 << 40]
        self.damaged = set()
        self.heard = []
        self.next_id = 0
        self.units = UnitTable([UNIT_BYTES] * LAYERS, UNIT_BYTES, SIZES)
        self.memory, self.storage, self.payloads = FakeMemory(), FakeStorage(), InMemorySwap()
        self.staging = FakeStaging()
        extent = SimpleNamespace(size_bytes=UNIT_BYTES, offset_bytes=0, crc32c=0)
        weights = SimpleNamespace(fd=8, extent=lambda unit: extent, check=lambda: None)
        codec = SimpleNamespace(name="int8", version=1, payload_bytes=lambda chunk_bytes: chunk_bytes // 2)
        self.send, inbox = trio.open_memory_channel(64)
        to_reads, self.reads = trio.open_memory_channel(2)
        to_decodes, self.decodes = trio.open_memory_channel(2)
        self.facts, facts = trio.open_memory_channel(2)
        to_readiness, self.readiness = trio.open_memory_channel(1)
        to_compressions, self.compressions = trio.open_memory_channel(1)
        to_writes, self.writes = trio.open_memory_channel(1)
        self.evict_facts, evict_facts = trio.open_memory_channel(1)
        workers = InlineWorkers()
        self.allocator = Allocator(
            inbox=inbox,
            restore_parts=RestoreParts(
                self.units,
                self.memory,
                weights,
                self.payloads,
                self.storage,
                self.staging,
                workers,
                overlap,
            ),
            restore_ends=RestoreEnds(to_reads, to_decodes, facts, to_readiness),
            evict_parts=EvictParts(
                self.units, self.memory, self.payloads, self.storage, codec, workers, compress_threads=2
            ),
            evict_ends=EvictEnds(to_compressions, to_writes, evict_facts),
            settings=AllocatorSettings(5.0, Order.BACKWARD, UnitTimes(1.0, 2.0, 4.0)),
            room=lambda: MemoryRoom(self.available[0], 1000),
            baseline=SimpleNamespace(settle=lambda: None),
        )

    async def run(self):
        """All tasks, until they are cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.allocator.run)
            nursery.start_soon(self.listen)
            for _ in range(2):
                nursery.start_soon(self.read)
                nursery.start_soon(self.decode)
                nursery.start_soon(self.compress)
            nursery.start_soon(self.write)

    async def pause(self):
        await trio.sleep(self.rng.random() * self.delay_s)

    def fails(self):
        return self.rng.random() < self.failures

    async def listen(self):
        async for event in self.readiness:
            self.heard.append(event)

    async def read(self):
        async for read in self.reads:
            await self.pause()
            bad = tuple(unit for unit in read.units if unit in self.damaged or self.fails())
            good = tuple(unit for unit in read.units if unit not in bad)
            if bad:
                code = "corrupt_chunk" if isinstance(bad[0], KvUnit) else "weights_unavailable"
                restored = () if read.staging else good
                fact = UnitsFailed(read.restore_id, read.layer, bad, restored, MzdError(code, "planted"))
                await self.facts.send(fact)
            if read.staging is not None:
                read.staging.release()
            if good and (read.staging is not None or not bad):
                await self.restored(read.restore_id, "read", read.layer, good)

    async def decode(self):
        async for batch in self.decodes:
            await self.pause()
            await self.restored(batch.restore_id, "decompress", batch.layer, batch.units)

    async def restored(self, restore_id, lane, layer, units):
        await self.facts.send(UnitsRestored(restore_id, lane, layer, units, UNIT_BYTES, 0, 1))

    async def compress(self):
        async for batch in self.compressions:
            await self.pause()
            encoded = tuple(not self.fails() for _ in batch.addresses)
            await self.evict_facts.send(ChunksCompressed(batch.batch_id, encoded))

    async def write(self):
        async for batch in self.writes:
            await self.pause()
            errors = tuple(MzdError("swap_full", "planted") if self.fails() else None for _ in batch.writes)
            await self.evict_facts.send(ChunksWritten(batch.batch_id, (0,) * len(errors), errors))

    # What the service does.

    async def restore(self, context="c", keep=0, capacity=600):
        """Ask for a context; (restore id, replies)."""
        self.next_id += 1
        replies = RestoreReplies(Reply(), Reply())
        message = RestoreContext(self.next_id, context, keep, capacity, True, replies)
        await self.send.send(message)
        return self.next_id, replies

    async def finish(self, num_tokens, context="c", seed=0):
        ids = np.random.default_rng(seed).integers(0, 9, 4096).astype(np.uint32)[:num_tokens]
        await self.send.send(FinishUse(context, ids))

    async def evict(self, goal_bytes=1 << 30, **more):
        reply = Reply()
        fields = {"reason": "test", "dry_run": False, "context": None} | more
        await self.send.send(Evict(goal_bytes, reply=reply, **fields))
        return await reply.get()

    async def use(self, num_tokens, context="c", keep=0):
        """A whole request that computes up to `num_tokens` tokens."""
        _, replies = await self.restore(context, keep, num_tokens)
        outcome = await replies.outcome.get()
        await self.finish(num_tokens, context)
        return outcome

    def states(self, context="c"):
        cache = self.units.caches[context]
        return {cache.state(place) for place in np.ndindex(cache.states.shape)}

    def check(self):
        """All is settled; every lease, slot and buffer that is out belongs to one unit."""
        held = [unit.lease for unit in [*self.units.weights, self.units.head] if unit.lease is not None]
        assert all(unit.state in SETTLED_STATES for unit in [*self.units.weights, self.units.head])
        slots = []
        for cache in self.units.caches.values():
            check_cache(cache)
            held += cache.leases.values()
            slots += cache.payloads.values()
        assert self.memory.out == set(held)
        assert len(held) == len(set(held)) == len(self.memory.populated)
        assert self.payloads.statistics().num_payloads == len(set(slots)) == len(slots)
        assert self.staging.out == 0


@pytest.fixture
async def world(nursery):
    world = World()
    nursery.start_soon(world.run)
    return world


def ready_units(events):
    return [event.layer if isinstance(event, LayerReady) else "head" for event in events]


async def test_the_first_restore_announces_every_layer_and_the_head_once(autojump_clock, world):
    outcome = await world.use(600)
    assert outcome.restored_bytes == (LAYERS + 1) * UNIT_BYTES  # the weights: there were no chunks
    assert sorted(map(str, ready_units(world.heard))) == ["0", "1", "2", "head"]
    assert all(len(event.chunk_addresses) == 3 for event in world.heard if isinstance(event, LayerReady))
    await world.evict(0)
    world.check()


async def test_what_is_announced_is_where_the_table_says(autojump_clock, world):
    await world.use(600)
    await world.evict()
    world.heard.clear()
    await world.use(600, keep=600)
    cache = world.units.caches["c"]
    for event in world.heard:
        if isinstance(event, HeadReady):
            assert event.address == world.units.head.lease.address
        else:
            assert event.weights_address == world.units.weights[event.layer].lease.address
            assert event.chunk_addresses.tolist() == cache.chunk_addresses(event.layer).tolist()


@pytest.mark.parametrize("overlap", list(OverlapMode))
async def test_without_overlap_nothing_is_ready_before_all_is(autojump_clock, nursery, overlap):
    world = World(overlap=overlap, delay_s=10.0)
    nursery.start_soon(world.run)
    await world.use(600)
    await world.evict()
    world.heard.clear()
    _, replies = await world.restore(keep=600)
    early = 0
    while not replies.outcome.is_settled:
        early = early if world.units.head.state is UnitState.RESIDENT else len(world.heard)
        await trio.sleep(0.1)
    assert (early > 0) == overlap.prefills_ahead
    assert len(world.heard) == LAYERS + 1


async def test_units_in_use_stay_and_the_answer_says_why(autojump_clock, world):
    _, replies = await world.restore()
    await replies.outcome.get()
    outcome = await world.evict()
    assert (outcome.freed_bytes, outcome.exhausted, outcome.warnings) == (0, True, ("in_use",))
    await world.finish(600)
    assert (await world.evict()).resident_bytes == 0
    world.check()


async def test_another_contexts_kv_goes_while_a_request_runs(autojump_clock, world):
    await world.use(600, "other")
    _, replies = await world.restore()
    await replies.outcome.get()
    assert (await world.evict()).freed_bytes == 9 * UNIT_BYTES
    assert UnitState.RESIDENT not in world.states("other")
    assert world.states("c") == {UnitState.RESIDENT}


async def test_a_dry_run_changes_nothing(autojump_clock, world):
    await world.use(600)
    before = world.units.resident_bytes()
    planned = await world.evict(dry_run=True)
    assert world.units.resident_bytes() == before
    assert planned.freed_bytes == before
    assert planned.resident_bytes == 0


async def test_an_abandoned_restore_dispatches_no_further_layer(autojump_clock, world):
    await world.use(600)
    await world.evict()
    world.heard.clear()
    restore_id, replies = await world.restore(keep=600)
    await replies.planned.get()
    await world.send.send(AbandonRestore(restore_id))
    with pytest.raises(MzdError, match="abandoned"):
        await replies.outcome.get()
    assert isinstance(world.heard[-1], RestoreFailed)
    assert world.units.head.state is UnitState.DROPPED
    await world.finish(600)
    await world.evict(0)
    world.check()
    outcome = await world.use(600, keep=600)
    assert outcome.restored_bytes > 0


async def test_a_restore_that_was_abandoned_in_the_queue_brings_nothing(autojump_clock, world):
    restore_id, first = await world.restore("a")
    second_id, second = await world.restore("b")
    await world.send.send(AbandonRestore(second_id))
    await first.outcome.get()
    with pytest.raises(MzdError, match="abandoned"):
        await second.outcome.get()
    assert restore_id < second_id
    assert world.heard[-1].restore_id == second_id  # whoever waits for a layer hears it
    for context in "ab":
        await world.finish(0, context)
    await world.evict(0)
    assert not world.units.caches
    world.check()


async def test_a_request_that_ends_before_its_restore_began_takes_it_back(autojump_clock, world):
    """Or it would protect its units for ever."""
    _, first = await world.restore("a")
    _, second = await world.restore("b")
    await world.finish(0, "b")
    with pytest.raises(MzdError, match="abandoned"):
        await second.outcome.get()
    await first.outcome.get()
    await world.finish(600, "a")
    assert (await world.evict()).resident_bytes == 0
    world.check()


async def test_a_request_that_ends_while_it_waits_for_an_eviction_changes_nothing(
    autojump_clock, world, nursery
):
    """Chunks that it would have forgotten are on their way out just then."""
    await world.use(513)
    nursery.start_soon(world.evict)
    await trio.sleep(0.01)
    assert world.states() & {UnitState.WRITING, UnitState.COMPRESSING}
    _, replies = await world.restore(keep=512)
    await world.finish(512)
    with pytest.raises(MzdError, match="abandoned"):
        await replies.outcome.get()
    await world.evict(0)
    world.check()
    assert (await world.use(513, keep=513)).restored_bytes == (LAYERS + 1 + 9) * UNIT_BYTES


async def test_damage_leaves_what_lies_before_it_in_every_layer(autojump_clock, world):
    """The rest is nowhere afterwards: nobody may take it for content."""
    await world.use(700)
    await world.evict()
    world.damaged = {KvUnit("c", 1, 2), KvUnit("c", 2, 1)}
    _, replies = await world.restore(keep=700, capacity=700)
    with pytest.raises(MzdError) as raised:
        await replies.outcome.get()
    kept_chunks, keep_tokens = world.units.caches["c"].num_chunks, raised.value.data["keep_tokens"]
    assert 256 * kept_chunks == keep_tokens in (256, 512)  # as far as was read until the first failure
    await world.finish(keep_tokens)
    await world.evict(0)
    world.check()


async def test_a_request_that_ends_during_its_restore_ends_it(autojump_clock, world):
    await world.use(600)
    await world.evict()
    _, replies = await world.restore(keep=600)
    await replies.planned.get()
    await world.finish(600)
    with pytest.raises(MzdError, match="abandoned"):
        await replies.outcome.get()
    await world.evict(0)
    world.check()
    assert len(world.units.caches["c"].tokens) == 600


async def test_a_restore_that_cannot_be_planned_is_told_to_everybody(autojump_clock, world):
    """600 tokens are wanted of 300: what is left is said, and a step that waits hears it too."""
    await world.use(300)
    world.heard.clear()
    _, replies = await world.restore(keep=600)
    for reply in (replies.planned, replies.outcome):
        with pytest.raises(MzdError) as raised:
            await reply.get()
        assert (raised.value.code, raised.value.data["keep_tokens"]) == ("corrupt_chunk", 512)
    await trio.testing.wait_all_tasks_blocked()
    assert [type(event) for event in world.heard] == [RestoreFailed]


async def test_memory_that_does_not_come_is_an_error_with_the_figures(autojump_clock, world):
    world.available[0] = 9000
    start_s = trio.current_time()
    with pytest.raises(MzdError) as raised:
        await world.use(600)
    assert raised.value.code == "insufficient_memory"
    assert 5.0 <= trio.current_time() - start_s < 5.1
    assert raised.value.data["needed_bytes"] == (LAYERS + 1 + 9) * UNIT_BYTES
    assert raised.value.data["available_bytes"] == 9000
    await world.finish(0)
    await world.evict(0)
    world.check()


async def test_memory_that_comes_in_time_is_taken(autojump_clock, world, nursery):
    world.available[0] = 0
    _, replies = await world.restore()
    await trio.sleep(4)
    world.available[0] = 1 << 40
    await replies.outcome.get()


async def test_pages_that_the_system_does_not_give_leave_what_is_there(autojump_clock, world):
    """The populate fails half way: what has come stays, nothing is leased for the rest."""
    world.memory.limit_bytes = 6 * UNIT_BYTES
    with pytest.raises(MzdError, match="no pages"):
        await world.use(600)
    await world.finish(0)
    await world.evict(0)
    world.check()
    world.memory.limit_bytes = 1 << 40
    await world.use(600)
    await world.evict(0)
    world.check()


async def test_the_end_of_the_inbox_closes_every_output(autojump_clock):
    world = World()
    world.send.close()
    await world.allocator.run()
    for channel in (world.reads, world.decodes, world.readiness, world.compressions, world.writes):
        assert is_closed(channel)


async def request(world, rng, context):
    """What a generation does, well or cancelled at some moment."""
    cache = world.units.caches.get(context)
    known = len(cache.tokens) if cache is not None else 0
    keep = rng.choice((known, rng.randrange(known + 1)))
    capacity = keep + rng.randrange(1, 500)
    restore_id, replies = await world.restore(context, keep, capacity)
    computed = keep
    try:
        with trio.move_on_after(rng.choice((STUCK_S, 4 * rng.random()))) as patience:
            await replies.outcome.get()
            computed = capacity
        if patience.cancelled_caught and rng.random() < 0.5:
            await world.send.send(AbandonRestore(restore_id))
    except MzdError as error:
        computed = min(keep, int(error.data.get("keep_tokens", keep)))
    await world.finish(computed, context, seed=rng.choice((0, 0, 0, 1)))


async def drop(world, context):
    reply = Reply()
    await world.send.send(DropContext(context, reply))
    await reply.get()


async def use_contexts(world, rng):
    """One request after the other, as the turnstile lets them through."""
    for _ in range(12):
        context = rng.choice("ab")
        await (drop if rng.random() < 0.15 else partial(request, rng=rng))(world, context=context)


async def evict_meanwhile(world, rng):
    for _ in range(12):
        await trio.sleep(2 * rng.random())
        extra = {"context": rng.choice("ab")} if rng.random() < 0.2 else {}
        await world.evict(rng.randrange(30) * UNIT_BYTES, **extra)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    failures=st.sampled_from((0.0, 0.1, 0.4)),
    overlap=st.sampled_from(OverlapMode),
    interleaving=st.random_module(),
)
def test_the_books_are_right_after_any_operations(seed, failures, overlap, interleaving):
    """Requests cancelled at any moment, evictions beside them, damaged chunks, flash that is full."""

    async def scenario():
        rng = random.Random(seed)
        world = World(rng, failures=failures, overlap=overlap)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.run)
            with trio.fail_after(10 * STUCK_S):
                for _ in range(3):
                    async with trio.open_nursery() as both:
                        both.start_soon(use_contexts, world, rng)
                        both.start_soon(evict_meanwhile, world, rng)
                    await world.evict(0)
                    world.check()
            nursery.cancel_scope.cancel()

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))
