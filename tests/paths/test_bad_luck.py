"""Bad luck: it has a name, all units are settled, every context is whole, and the next answer is right."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import replace

import pytest
import trio

from mzd.actors import restore_operation
from mzd.daemon.config import SwapConfig, ThreadsConfig
from mzd.errors import MzdError
from mzd.memory import staging
from mzd.memory.staging import StagingPool
from tests.paths.harness import CONFIG, open_daemon
from tests.paths.more_faults import (
    Refusals,
    arena_without_pages,
    arena_without_room,
    cancel_requests,
    failing_journal,
    failing_token_logs,
    io_fault,
    outcome_of,
    refused_maps,
    refused_payloads,
    rotten_extent,
    watched_messages,
)
from tests.paths.story import find_story

ONE_OF_EACH = replace(CONFIG, threads=ThreadsConfig(read=1, decompress=1, allocate=1, write=1, compress=1))
"""One thread a kind, so that messages come in nearly the same order each time."""

NO_FLASH = replace(ONE_OF_EACH, codec="int8", swap=SwapConfig(storage=False))
WAYS = {"flash": ONE_OF_EACH, "payloads": replace(ONE_OF_EACH, codec="int8"), "ram": NO_FLASH}
"""Where KV lies after an eviction: raw on flash, payloads on flash, payloads in RAM."""

MESSAGES_MAX = 400
"""More than any of these requests sends: a test that gets there has not cancelled what it thinks."""


@pytest.fixture(scope="module")
def tell(device, fixture_store, tmp_path_factory):
    """Finds a story with a prompt of so many tokens."""

    async def find(prompt_tokens):
        return await find_story(device, fixture_store, tmp_path_factory.mktemp("story"), prompt_tokens)

    return find


@pytest.fixture(scope="module")
def story(tell):
    """300 tokens: two chunks, of which one is not full."""
    return trio.run(tell, 300)


# Requests that are cancelled between two messages.


async def cancelled_at_every_message(daemon, messages, begin, request, check):
    """Cancel `request` at its first message, at its second, and so on, until it ends before; how often."""
    for number in range(MESSAGES_MAX):
        await begin()
        with messages.acting({number: lambda: cancel_requests(daemon)}):
            outcome = await outcome_of(request())
            num_messages = messages.count
        assert outcome in ("cancelled", "done")
        await check()
        if num_messages <= number:
            return number
    raise AssertionError("the request has more messages than there can be")


@pytest.mark.parametrize("way", WAYS)
async def test_an_answer_cancelled_at_any_message(device, fixture_store, tmp_path, story, way):
    """In the restore, the prefill or the decode, wherever the KV was."""
    with watched_messages() as messages:
        async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:

            async def begin():
                await story.begin(daemon)
                await daemon.evict()

            number = await cancelled_at_every_message(
                daemon, messages, begin, lambda: story.ask(daemon), lambda: story.check_goes_on(daemon)
            )
    assert number > 40


@pytest.mark.parametrize("way", WAYS)
async def test_a_restore_cancelled_at_any_message(device, fixture_store, tmp_path, story, way):
    with watched_messages() as messages:
        async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:

            async def begin():
                await daemon.evict()

            async def restore():
                await daemon.call("restore", context="c")

            async def check():
                """Nothing of the context is lost: neither tokens nor KV."""
                await daemon.settle()
                assert len(daemon.units.caches["c"].tokens) == len(story.prompt)

            await story.begin(daemon)
            number = await cancelled_at_every_message(daemon, messages, begin, restore, check)
            usage = await story.check_goes_on(daemon)
    assert number > 20
    assert (usage["reused_tokens"], usage["recomputed_tokens"]) == (len(story.prompt), 0)


async def test_a_long_prefill_cancelled_at_any_message(device, fixture_store, tmp_path, tell):
    """Two steps of a prompt into an empty context; then it is asked again."""
    long_story = await tell(600)
    with watched_messages() as messages:
        async with open_daemon(device, fixture_store, tmp_path, ONE_OF_EACH) as daemon:

            async def begin():
                with contextlib.suppress(MzdError):
                    await daemon.call("drop", context="c")

            async def prefill():
                await daemon.generate("c", long_story.prompt)

            async def check():
                await daemon.settle()
                if any(c.name == "c" for c in daemon.conversations):
                    await long_story.check_goes_on(daemon)

            number = await cancelled_at_every_message(daemon, messages, begin, prefill, check)
    assert number > 10


async def test_a_request_that_drops_a_chunk_cancelled_at_any_message(device, fixture_store, tmp_path, tell):
    """513 tokens, and none is new: the last is computed again, its chunk let go while the plan stands."""
    edge_story = await tell(513)
    with watched_messages() as messages:
        async with open_daemon(device, fixture_store, tmp_path, ONE_OF_EACH) as daemon:

            async def begin():
                await edge_story.begin(daemon)
                await daemon.evict()

            async def again():
                await daemon.generate("c", [], 0)

            await cancelled_at_every_message(
                daemon, messages, begin, again, lambda: edge_story.check_goes_on(daemon)
            )


async def test_a_request_that_waits_for_an_eviction_cancelled_at_any_message(
    device, fixture_store, tmp_path, tell
):
    """It may end before its restore has begun, and must not cut the chunk that the eviction has in hand."""
    edge_story = await tell(513)
    with watched_messages() as messages:
        async with open_daemon(device, fixture_store, tmp_path, WAYS["payloads"]) as daemon:

            async def evict_and_ask(begun):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(daemon.evict)
                    await begun.wait()
                    return await outcome_of(daemon.generate("c", [], 0, request="asked"))

            for number in range(1, MESSAGES_MAX):
                await edge_story.begin(daemon)
                begun = trio.Event()
                with messages.acting({0: begun.set, number: lambda: cancel_requests(daemon, "asked")}):
                    assert await evict_and_ask(begun) in ("cancelled", "done")
                    num_messages = messages.count
                await edge_story.check_goes_on(daemon)
                if num_messages <= number:
                    break
    assert 40 < number < MESSAGES_MAX - 1


# Memory that is refused.


@pytest.mark.parametrize("make", [arena_without_pages, arena_without_room])
@pytest.mark.parametrize("way", WAYS)
async def test_memory_refused_at_any_unit_of_a_restore(
    device, fixture_store, tmp_path, story, way, make, monkeypatch
):
    """`insufficient_memory`; what came back stays, the rest is where it was, nothing is computed again."""
    monkeypatch.setattr(restore_operation, "ALLOCATION_BYTES", 1)  # each layer by itself
    refuse, num_refused = Refusals(), 0
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way], memory=make(refuse)) as daemon:
        for number in range(MESSAGES_MAX):
            await story.begin(daemon)
            await daemon.evict()
            refuse.arm(after=number)
            outcome = await outcome_of(story.ask(daemon))
            refuse.disarm()
            if outcome == "done":
                break
            assert outcome == "insufficient_memory"
            num_refused += 1
            usage = await story.check_goes_on(daemon)
            assert usage["recomputed_tokens"] == 0
    assert num_refused == 1 if make is arena_without_room else num_refused >= 5


@pytest.mark.parametrize("after", [0, 1, 3, 7])
@pytest.mark.parametrize("times", [1, 1000])
async def test_payloads_refused_in_an_eviction(device, fixture_store, tmp_path, story, after, times):
    """The rest goes to flash; nothing is left half-way, and the account is right."""
    refuse = Refusals()
    async with open_daemon(device, fixture_store, tmp_path, WAYS["payloads"]) as daemon:
        await story.begin(daemon)
        before_bytes = daemon.reporter.resident_bytes()
        refuse.arm(after, times)
        with refused_payloads(refuse):
            result = await daemon.evict()
        await daemon.settle()
        assert result["warnings"] == ["insufficient_memory"]
        assert result["resident_bytes"] == 0
        assert result["freed_bytes"] == before_bytes
        assert (await story.check_goes_on(daemon))["recomputed_tokens"] == 0


async def test_payloads_refused_where_there_is_no_flash(device, fixture_store, tmp_path, story):
    """KV stays; weights go; both reasons are said."""
    refuse = Refusals()
    async with open_daemon(device, fixture_store, tmp_path, NO_FLASH) as daemon:
        await story.begin(daemon)
        refuse.arm(3)
        with refused_payloads(refuse):
            result = await daemon.evict()
        await daemon.settle()
        assert set(result["warnings"]) == {"insufficient_memory", "swap_full"}
        assert result["exhausted"]
        assert daemon.states("c") == {"RESIDENT", "COMPRESSED"}
        assert daemon.units.weights_bytes == daemon.units.head_bytes == 0
        await story.check_goes_on(daemon)


async def test_no_memory_for_staging(device, fixture_store, tmp_path, story):
    async with open_daemon(device, fixture_store, tmp_path, WAYS["payloads"]) as daemon:
        await story.begin(daemon)
        await daemon.evict()
        for _ in range(12):  # more often than there are slots: none is lost
            with refused_maps(staging), pytest.raises(MzdError) as raised:
                await story.ask(daemon)
            assert raised.value.code == "insufficient_memory"
            await daemon.settle()
        assert (await story.check_goes_on(daemon))["recomputed_tokens"] == 0


async def test_a_single_slot_of_staging_is_enough(device, fixture_store, tmp_path, story):
    """Everybody waits for it, and nobody for ever."""
    async with open_daemon(device, fixture_store, tmp_path, replace(CONFIG, codec="int8")) as daemon:
        sizes = daemon.units.kv_sizes
        pool = StagingPool(sizes.compressed_slot_bytes, 1)
        daemon.system.allocator.restore_parts.staging = daemon.opened.parts.staging = pool
        await story.begin(daemon)
        for _ in range(5):
            await daemon.evict()
            await daemon.call("restore", context="c")
        await daemon.evict()
        await story.check_goes_on(daemon)


# Flash that fails.


@pytest.mark.parametrize("way", ["flash", "payloads"])
@pytest.mark.parametrize("kind", ["short", "eintr"])
async def test_calls_that_are_cut_short_are_nothing(device, fixture_store, tmp_path, story, kind, way):
    """Every one of them or every second: the same tokens, no warning, nothing computed again."""
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        for every_nth in (2, 3):
            await story.begin(daemon)
            with io_fault(kind, every_nth):
                assert (await daemon.evict())["warnings"] == []
                assert (await story.ask(daemon))["usage"]["recomputed_tokens"] == 0
            await story.check_goes_on(daemon)


@pytest.mark.parametrize("way", ["flash", "payloads"])
@pytest.mark.parametrize("every_nth", [1, 2, 5, 9])
async def test_reads_that_fail(device, fixture_store, tmp_path, story, every_nth, way):
    """EIO from weights and chunks alike: a name for it, and the context goes on."""
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        await story.begin(daemon)
        await daemon.evict()
        with io_fault("eio", every_nth):
            outcome = await outcome_of(story.ask(daemon))
        assert outcome in ("weights_unavailable", "done")
        await story.check_goes_on(daemon)


@pytest.mark.parametrize("way", ["flash", "payloads"])
@pytest.mark.parametrize(("kind", "warning"), [("enospc", "swap_full"), ("eio", "internal")])
@pytest.mark.parametrize("every_nth", [1, 2, 5])
async def test_writes_that_fail(device, fixture_store, tmp_path, story, way, kind, warning, every_nth):
    """What cannot be written stays in RAM, and the account is right."""
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        await story.begin(daemon)
        before_bytes = daemon.reporter.resident_bytes()
        with io_fault(kind, every_nth):
            result = await daemon.evict()
        await daemon.settle()
        assert result["warnings"] == [warning]
        assert result["exhausted"]
        assert result["freed_bytes"] == before_bytes - result["resident_bytes"] > 0
        assert (await story.check_goes_on(daemon))["recomputed_tokens"] == 0


async def test_what_flash_refuses_goes_to_ram(device, fixture_store, tmp_path, tell):
    """Even in an eviction that meant to take everything, and so had no plan beyond it."""
    long_story = await tell(900)
    async with open_daemon(device, fixture_store, tmp_path, WAYS["payloads"]) as daemon:
        await long_story.begin(daemon)
        planned = await daemon.evict(dry_run=True)
        assert ("KVonly", "flash") in {(step["stage"], step["to"]) for step in planned["steps"]}
        with io_fault("enospc", 1):
            await daemon.evict()
        await daemon.settle()
        assert daemon.states("c") == {"COMPRESSED"}
        assert (await long_story.check_goes_on(daemon))["recomputed_tokens"] == 0


@pytest.mark.parametrize("way", ["flash", "payloads"])
async def test_any_chunk_may_rot(device, fixture_store, tmp_path, story, way):
    """Each of the eight in turn: its checksum tells, its range is computed again, the tokens are right."""
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        num_recomputed = []
        for number in range(9):
            await story.begin(daemon)
            await daemon.evict()
            with rotten_extent(number, wanted=lambda fd: fd != daemon.store_fd):
                usage = (await story.ask(daemon))["usage"]
            num_recomputed.append(usage["recomputed_tokens"])
            await story.check_goes_on(daemon)
    length = len(story.prompt)
    assert num_recomputed == [length, length - 256] * 4 + [0]


@pytest.mark.parametrize("way", ["flash", "payloads"])
async def test_a_restore_over_a_rotten_chunk(device, fixture_store, tmp_path, story, way):
    """The RPC `restore` brings back what is whole; the next request computes the rest."""
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        await story.begin(daemon)
        await daemon.evict()
        with rotten_extent(3, wanted=lambda fd: fd != daemon.store_fd):
            await daemon.call("restore", context="c")
        await daemon.settle()
        assert len(daemon.units.caches["c"].tokens) == 256
        await daemon.call("restore", context="c")
        usage = await story.check_goes_on(daemon)
        assert usage["recomputed_tokens"] == len(story.prompt) - 256


# The journal, and the end of the daemon.


@pytest.mark.parametrize("way", ["flash", "payloads"])
@pytest.mark.parametrize(("error", "warning"), [(errno.ENOSPC, "swap_full"), (errno.EIO, "internal")])
async def test_records_that_cannot_be_written(device, fixture_store, tmp_path, story, way, error, warning):
    """What has no record counts as not written: nothing leaves RAM for it, then or after a restart."""
    refuse = Refusals()
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        await story.begin(daemon)
        before_bytes = daemon.reporter.resident_bytes()
        refuse.arm()
        with failing_journal(error, refuse):
            result = await daemon.evict()
        await daemon.settle()
        assert result["warnings"] == [warning]
        assert result["freed_bytes"] == before_bytes - result["resident_bytes"] > 0
        assert daemon.states("c") <= {"RESIDENT", "COMPRESSED"}
        assert daemon.opened.parts.storage.statistics().swap_bytes == 0
        await story.check_goes_on(daemon)
    async with open_daemon(device, fixture_store, tmp_path, WAYS[way]) as daemon:
        await story.check_goes_on(daemon)


async def test_a_token_log_that_cannot_be_written(device, fixture_store, tmp_path, story):
    """The answer is given all the same, and what the log lacks it gets with the next one."""
    async with open_daemon(device, fixture_store, tmp_path, WAYS["flash"]) as daemon:
        await story.begin(daemon)
        with failing_token_logs():
            result = await story.ask(daemon)
        assert result["tokens"] == story.answer[:2]
        await story.check_goes_on(daemon)
        await daemon.evict()
    async with open_daemon(device, fixture_store, tmp_path, WAYS["flash"]) as daemon:
        known = next(list(c.tokens) for c in daemon.conversations)
        assert known == [*story.prompt, *story.question, *story.answer[:4]]
        assert (await daemon.generate("c", [], 1))["tokens"] == story.answer[4:5]


@pytest.mark.parametrize("way", ["flash", "payloads"])
async def test_an_eviction_that_the_end_of_the_daemon_interrupts(device, fixture_store, tmp_path, story, way):
    """At any message: the next daemon knows the context, and what was stored is not computed again."""
    reused = []
    with watched_messages() as messages:
        for number in range(MESSAGES_MAX):
            state = tmp_path / str(number)
            with trio.CancelScope() as life:
                async with open_daemon(device, fixture_store, state, WAYS[way]) as daemon:
                    await story.begin(daemon)
                    with messages.acting({number: life.cancel}):
                        await daemon.evict()
            async with open_daemon(device, fixture_store, state, WAYS[way]) as daemon:
                usage = await story.check_goes_on(daemon)
            reused.append(usage["reused_tokens"])
            assert usage["reused_tokens"] + usage["recomputed_tokens"] >= len(story.prompt) - 1
            if not life.cancelled_caught:
                break
    assert reused[-1] == len(story.prompt)
    assert reused[0] == 0
