"""The generation path: real actors, real device; an answer must not tell what was evicted meanwhile."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import trio

from mzd.errors import MzdError
from tests.paths.harness import BLOCKED_S, open_daemon, slow_workers

PIECES = (5, 5, 22)
"""Tokens that a context is asked for at a time; the contexts take turns."""

CLEAR_MARGIN = 0.1
"""Between the two best logits; under it, steps of other shapes may choose otherwise (case 048).

Such steps move a logit by up to 0.016 here; nine choices in ten have this margin.
"""

POSITIONS_MAX = 40
"""Looked at for choices with clear margins, before it counts as an error that there are too few."""

NUM_CANCELLED = 50
CYCLES_MAX = 130
"""As many as the context has room for."""


def some_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(5, 320, count).tolist()


async def in_turns(daemon, golden, between):
    """Ask for the fixture's continuations, all contexts in turns; `between` is awaited after each piece."""
    said = [[] for _ in golden]
    for round_number, size in enumerate(PIECES):
        for i, (prompt, expected) in enumerate(golden):
            wanted = min(size, len(expected) - len(said[i]))
            tokens = [] if round_number else prompt
            said[i] += (await daemon.generate(f"c{i}", tokens, wanted))["tokens"] if wanted > 0 else []
            await between()
    return said


@pytest.mark.parametrize(("codec", "fraction"), [("int8", 0), ("none", 0), ("none", 0.37), ("none", 1)])
async def test_greedy_tokens_equal_the_references(device, fixture_store, golden, tmp_path, fraction, codec):
    """Case 036 too: contexts in turns say what each says alone."""
    async with open_daemon(device, fixture_store, tmp_path, codec=codec) as daemon:

        async def evict():
            await daemon.evict(fraction)
            await daemon.settle()

        said = await in_turns(daemon, golden, evict)
    assert said == [expected for _, expected in golden]


async def logits_after(daemon, context, tokens):
    """(vocab,) float32: what the context would choose from once it has been given `tokens`."""
    daemon.engine.seen.clear()
    await daemon.generate(context, tokens, 0)
    return daemon.engine.seen[-1][0]


async def check_goes_on(daemon, context, tokens, count):
    """The context goes on as a new one with its tokens does: `count` choices, those with clear margins.

    Both are given the new one's choices, so that a doubtful step changes nothing for those behind it. A
    context near the end of its length may have fewer than `count`.
    """
    num_positions = min(POSITIONS_MAX, daemon.opened.context_length - len(tokens))
    num_compared, known, more = 0, tokens, []
    for i in range(num_positions):
        expected = await logits_after(daemon, "fresh", known)
        found = await logits_after(daemon, context, more)
        if np.ptp(np.sort(expected)[-2:]) >= CLEAR_MARGIN:
            assert found.argmax() == expected.argmax(), f"token {i} after {len(tokens)} of {context}"
            num_compared += 1
        if num_compared == count:
            break
        known = more = [int(expected.argmax())]
    assert num_compared == count or num_positions < POSITIONS_MAX
    if num_positions:
        await daemon.call("drop", context="fresh")


# Cases from the field.


async def test_after_an_eviction_only_new_tokens_are_computed(device, long_store, tmp_path):
    """Case 001."""
    prompt, question = some_tokens(1200), some_tokens(8, seed=1)
    async with open_daemon(device, long_store, tmp_path) as daemon:
        for context in ("kept", "evicted"):
            await daemon.generate(context, prompt)
        kept = await daemon.generate("kept", question, 8)
        await daemon.evict()
        evicted = await daemon.generate("evicted", question, 8)
        await daemon.settle()
    assert evicted["usage"] == {
        "prompt_tokens": 1208,
        "reused_tokens": 1200,
        "computed_tokens": 8,
        "recomputed_tokens": 0,
        "completion_tokens": 8,
    }
    assert kept["usage"] == evicted["usage"]
    assert kept["tokens"] == evicted["tokens"]


async def test_twenty_cycles_leave_no_more_resident_than_one(device, wide_store, tmp_path):
    """Cases 009 and 010: units, and the process's resident set."""
    async with open_daemon(device, wide_store, tmp_path, codec="int8") as daemon:
        await daemon.generate("c", some_tokens(700))
        resident, resident_set = [], []
        for _ in range(20):
            await daemon.evict()
            resident_set.append(daemon.resident_set_bytes())
            await daemon.generate("c", [7], 1)
            resident.append(daemon.units.resident_bytes())
        await daemon.settle()
        assert len((await daemon.call("contexts"))["contexts"]) == 1
    assert resident == [resident[0]] * 20
    assert resident_set[-1] < 1.02 * resident_set[2]


async def test_no_secret_crosses_from_one_context_to_another(device, long_store, tmp_path):
    """Case 036: sixty turns of two contexts, evictions between; each says what it says alone."""
    rng = random.Random(3)
    turns = [(rng.choice("ab"), some_tokens(rng.randrange(1, 9), seed=i), rng.random()) for i in range(60)]
    secrets = {"a": some_tokens(300, seed=100), "b": some_tokens(290, seed=200)}

    async def run(state, contexts, evicting):
        async with open_daemon(device, long_store, state) as daemon:
            for context in contexts:
                await daemon.generate(context, secrets[context])
            said = []
            for context, tokens, fraction in turns:
                if context in contexts:
                    if evicting:
                        await daemon.evict(fraction)
                    result = await daemon.generate(context, tokens, 2)
                    said.append((context, result["tokens"], result["usage"]))
            await daemon.settle()
            return said

    both = await run(tmp_path / "both", "ab", True)
    for context in "ab":
        alone = await run(tmp_path / context, context, False)
        assert [turn for turn in both if turn[0] == context] == alone


async def test_looking_wakes_nothing(device, long_store, tmp_path):
    """Case 007: nothing is restored, and nobody's last use changes."""
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", some_tokens(300))
        await daemon.evict()
        used_s = daemon.units.caches["c"].last_used_s
        for _ in range(100):
            status = await daemon.call("status")
            await daemon.call("contexts")
        assert status["state"] == "idle"
        assert daemon.units.resident_bytes() == 0
        assert daemon.arena.statistics().populated_bytes == 0
        assert daemon.units.caches["c"].last_used_s == used_s


async def test_a_restore_makes_the_next_answer_need_none(device, long_store, tmp_path):
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("c", some_tokens(300))
        full_bytes = daemon.units.resident_bytes()
        await daemon.evict()
        for expected in (full_bytes, 0):
            result = await daemon.call("restore")
            assert result == {"restored_bytes": expected, "resident_bytes": full_bytes}
        await daemon.settle()


async def test_a_restore_with_no_context_brings_the_weights(device, long_store, tmp_path):
    async with open_daemon(device, long_store, tmp_path) as daemon:
        result = await daemon.call("restore")
        await daemon.settle()
        assert result["restored_bytes"] == daemon.units.weights_bytes + daemon.units.head_bytes > 0


# Memory short.


async def test_without_memory_there_is_one_error_with_both_numbers(device, long_store, tmp_path):
    """Case 058: nothing is evicted for it, nothing is lost, and the next request works."""
    available = [1 << 40]
    async with open_daemon(
        device, long_store, tmp_path, available_bytes=lambda: available[0], restore_wait_s=0.1
    ) as daemon:
        await daemon.generate("c", some_tokens(600))
        await daemon.evict()
        available[0] = 1 << 20
        with pytest.raises(MzdError) as raised:
            await daemon.generate("c", [7], 1)
        assert raised.value.code == "insufficient_memory"
        assert raised.value.data["needed_bytes"] > 1 << 20
        assert raised.value.data["available_bytes"] == 1 << 20
        await daemon.settle()
        assert daemon.states("c") == {"STORED"}
        available[0] = 1 << 40
        result = await daemon.generate("c", [7], 1)
        assert (result["usage"]["reused_tokens"], result["usage"]["computed_tokens"]) == (600, 1)


async def test_a_restore_waits_for_memory_that_comes(device, long_store, tmp_path):
    available = iter([0, 0, 0])
    async with open_daemon(
        device, long_store, tmp_path, available_bytes=lambda: next(available, 1 << 40)
    ) as daemon:
        result = await daemon.generate("c", [7, 8], 1)
        assert len(result["tokens"]) == 1
        assert next(available, None) is None


# While others run.


async def streamed(daemon, phase, then, **params):
    """Generate, and once a notification of that phase has come, await `then` beside it; both results."""
    reached = trio.Event()

    async def listen(method, given):
        if given.get("phase", method) == phase:
            reached.set()

    results = {}

    async def generate():
        results["generate"] = await daemon.client.call(
            "generate", params | {"stream": True, "temperature": 0.0}, on_notification=listen
        )

    with trio.fail_after(2 * BLOCKED_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await reached.wait()
            results["then"] = await then()
    return results["generate"], results["then"]


@pytest.mark.parametrize("phase", ["restoring", "prefill", "token"])
async def test_an_eviction_meanwhile_takes_only_what_is_not_needed(device, long_store, tmp_path, phase):
    """Case 055: the request ends with the tokens that it would have had; another context gives its KV."""
    prompt = some_tokens(1400)
    async with open_daemon(device, long_store, tmp_path) as daemon:
        alone = await daemon.generate("alone", prompt, 20)
        await daemon.evict()
        given = {"context": "c", "tokens": prompt, "max_tokens": 20}
        result, evicted = await streamed(daemon, phase, daemon.evict, **given)
        assert result["tokens"] == alone["tokens"]
        assert "in_use" in evicted["warnings"] or evicted["freed_bytes"] > 0
        await daemon.settle()
        await check_goes_on(daemon, "c", prompt + result["tokens"], 4)


async def test_requests_in_a_row_each_end_though_all_is_evicted_between(device, long_store, tmp_path):
    """Evictions between accept and start: twelve requests at once, twelve evictions."""
    async with open_daemon(device, long_store, tmp_path, codec="int8") as daemon:
        async with trio.open_nursery() as nursery:
            for i in range(12):
                nursery.start_soon(daemon.generate, f"c{i % 4}", some_tokens(40, seed=i), 2)
                nursery.start_soon(daemon.evict, 1.0)
        await daemon.settle()
        contexts = (await daemon.call("contexts"))["contexts"]
        assert [context["tokens"] for context in contexts] == [3 * 42] * 4


async def test_cancelling_at_any_moment_leaks_nothing(device, long_store, tmp_path):
    """Cases 060 and 064: fifty times, in restore, prefill or decode; then the context goes on.

    The moment lies anywhere in what the last request took that nobody cancelled, however fast the machine is.
    """
    rng = random.Random(5)
    num_cancelled, whole_s = 0, math.inf
    workers = slow_workers(seed=5, delay_s=0.002)
    async with open_daemon(device, long_store, tmp_path, workers=workers) as daemon:
        await daemon.generate("c", some_tokens(500))
        for i in range(CYCLES_MAX):
            await daemon.evict(rng.choice((0.5, 1.0)))
            start_s = trio.current_time()
            with trio.move_on_after(rng.random() * whole_s) as scope:
                await daemon.generate("c", some_tokens(4, seed=i), 6)
                whole_s = trio.current_time() - start_s
            await daemon.settle()
            num_cancelled += scope.cancelled_caught
            if num_cancelled == NUM_CANCELLED:
                break
        known = next(c for c in daemon.conversations if c.name == "c")
        await check_goes_on(daemon, "c", list(known.tokens), 8)
        await daemon.settle()
    assert num_cancelled == NUM_CANCELLED


OPERATIONS = ("generate", "generate", "generate", "evict", "evict", "cancelled", "restore", "drop", "status")


async def test_any_mix_of_requests_goes_on(device, long_store, tmp_path):
    """Case 057: 500 operations from three clients at once; none is stuck, and all contexts are right."""
    num_done = 0
    async with open_daemon(device, long_store, tmp_path) as daemon:
        await daemon.generate("bystander", some_tokens(600))

        async def user(seed):
            nonlocal num_done
            rng = random.Random(seed)
            while num_done < 500:
                num_done += 1
                await one_operation(daemon, rng, context=f"{seed}-{rng.randrange(2)}")

        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(user, seed)
        await daemon.settle()
        assert "bystander" in {known.name for known in daemon.conversations}
        for known in list(daemon.conversations):
            await check_goes_on(daemon, known.name, list(known.tokens), 4)
            await daemon.evict()
            await daemon.settle()


async def one_operation(daemon, rng, context):
    """One random request; only what may be said to it is forgiven."""
    operation = rng.choice(OPERATIONS)
    try:
        match operation:
            case "generate":
                await daemon.generate(
                    context, some_tokens(rng.randrange(1, 40), seed=rng.randrange(1 << 30)), 2
                )
            case "cancelled":
                with trio.move_on_after(rng.random() * 0.05):
                    await daemon.generate(context, some_tokens(rng.randrange(1, 600)), 4)
            case "evict":
                extra = {"context": context} if rng.random() < 0.2 else {}
                await daemon.evict(rng.choice((0.1, 0.5, 1.0)), **extra)
            case "restore" | "drop":
                await daemon.call(operation, context=context)
            case "status":
                await daemon.call("status")
    except MzdError as error:
        if error.code not in ("unknown_context", "context_full"):
            raise
        if error.code == "context_full":
            await daemon.call("drop", context=context)
