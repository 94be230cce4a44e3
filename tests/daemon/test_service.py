"""The service over a whole daemon: what each method checks, and what it leaves when it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from mzd.daemon.config import LimitsConfig
from mzd.errors import MzdError
from mzd.memory.token_log import TokenLog
from tests.paths.harness import BLOCKED_S, open_daemon

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
async def daemon(device, fixture_store, tmp_path):
    async with open_daemon(device, fixture_store, tmp_path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def expected():
    models = json.loads((FIXTURES / "expected.json").read_text())["models"]
    return next(model for model in models if model["file"] == "llama-F16.gguf")


async def refused(daemon, method, **params):
    """The error of a call that must fail."""
    with pytest.raises(MzdError) as raised:
        await daemon.call(method, **params)
    return raised.value


async def names(daemon):
    return [context["context"] for context in (await daemon.call("contexts"))["contexts"]]


async def test_a_text_prompt_begins_with_bos_once(daemon, expected):
    """Case 129: the raw path adds it at the beginning of a context and nowhere else."""
    case = expected["tokenize"][0]
    first = await daemon.call("generate", context="c", prompt=case["text"], max_tokens=0)
    assert first["usage"]["prompt_tokens"] == len(case["tokens"]) + 1
    second = await daemon.call("generate", context="c", prompt=case["text"], max_tokens=0)
    assert second["usage"]["prompt_tokens"] == 2 * len(case["tokens"]) + 1
    (conversation,) = daemon.conversations
    assert conversation.tokens == [0, *case["tokens"], *case["tokens"]]


async def test_a_conversation_reuses_what_it_shares_with_the_context(daemon):
    """Case 051: the answer is not rendered as it was generated; what follows the difference is computed."""
    turns = [{"role": "user", "content": "Hi"}]
    first = await daemon.call("generate", context="c", messages=turns, max_tokens=4, temperature=0)
    turns += [{"role": "assistant", "content": "no such answer"}, {"role": "user", "content": "Why?"}]
    second = await daemon.call("generate", context="c", messages=turns, max_tokens=4, temperature=0)
    assert second["usage"]["reused_tokens"] == first["usage"]["prompt_tokens"]
    fresh = await daemon.call("generate", messages=turns, max_tokens=4, temperature=0)
    assert fresh["usage"]["reused_tokens"] == 0
    assert fresh["tokens"] == second["tokens"]
    await daemon.settle()


async def test_a_prompt_that_does_not_fit_is_refused_and_leaves_no_context(daemon):
    """Case 142: with both counts; nothing is cut off silently."""
    error = await refused(daemon, "generate", context="c", tokens=[7] * 1024)
    assert error.code == "context_full"
    assert (error.data["prompt_tokens"], error.data["context_length"]) == (1024, 1024)
    assert await names(daemon) == []


async def test_a_context_fills_to_its_end_and_then_says_so(daemon):
    """Case 012."""
    full = await daemon.generate("c", [7] * 1020, 50)
    assert (len(full["tokens"]), full["finish_reason"]) == (4, "length")
    error = await refused(daemon, "generate", context="c", tokens=[7])
    assert error.code == "context_full"
    await daemon.settle()


@pytest.mark.parametrize("method", ["generate", "detokenize"])
async def test_tokens_outside_the_vocabulary_are_refused(daemon, method):
    error = await refused(daemon, method, tokens=[5, 320])
    assert (error.code, error.data["parameter"]) == ("invalid_params", "tokens")
    assert await names(daemon) == []


async def test_nothing_to_say_is_refused(daemon):
    error = await refused(daemon, "generate", tokens=[])
    assert error.code == "invalid_params"
    assert await names(daemon) == []


async def test_a_refused_request_leaves_the_context_as_it_was(daemon):
    await daemon.generate("c", [5, 6, 7], 2)
    (before,) = [list(conversation.tokens) for conversation in daemon.conversations]
    await refused(daemon, "generate", context="c", tokens=[999])
    await refused(daemon, "generate", context="c", tokens=[7] * 1024)
    assert [conversation.tokens for conversation in daemon.conversations] == [before]
    assert (await daemon.generate("c", [], 1))["usage"]["reused_tokens"] == len(before) - 1


async def test_there_are_as_many_contexts_as_may_be(device, fixture_store, tmp_path):
    async with open_daemon(device, fixture_store, tmp_path, limits=LimitsConfig(contexts=2)) as daemon:
        for context in "ab":
            await daemon.generate(context, [7])
        assert (await refused(daemon, "generate", context="c", tokens=[7])).code == "context_limit"
        await daemon.call("drop", context="a")
        await daemon.generate("c", [7])
        assert sorted(await names(daemon)) == ["b", "c"]


async def test_more_requests_than_may_wait_are_busy(device, fixture_store, tmp_path):
    """The first one waits for memory until all have come."""
    codes, available_bytes = [], [0]
    config = {"limits": LimitsConfig(waiting=2), "restore_wait_s": BLOCKED_S}
    room = {"available_bytes": lambda: available_bytes[0]}
    async with open_daemon(device, fixture_store, tmp_path, **config, **room) as daemon:

        async def ask(context):
            try:
                await daemon.generate(context, [7] * 30, 3)
                codes.append("done")
            except MzdError as error:
                codes.append(error.code)
                if codes.count("busy") == 5:
                    available_bytes[0] = 1 << 40

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(ask, f"c{i}")
    assert codes == ["busy"] * 5 + ["done"] * 3


async def test_dropping_takes_memory_flash_and_name(daemon):
    await daemon.generate("c", [7] * 300, 1)
    await daemon.evict(0.8)
    assert await daemon.call("drop", context="c") == {"dropped": "c"}
    await daemon.settle()
    assert not daemon.units.caches
    assert (await daemon.call("status"))["storage"]["swap_bytes"] == 0
    assert not (daemon.opened.contexts.path / "c").exists()
    again = await daemon.generate("c", [7] * 300, 1)
    assert again["usage"]["reused_tokens"] == 0


async def test_an_answer_survives_a_token_log_that_cannot_be_written(daemon, monkeypatch):
    """It costs the next start something, and this answer nothing; the next one writes what is missing."""
    await daemon.generate("c", [5, 6], 1)

    def fail(log, tokens):
        raise MzdError("swap_full", "planted")

    with monkeypatch.context() as patch:
        patch.setattr(TokenLog, "append", fail)
        assert len((await daemon.generate("c", [7], 2))["tokens"]) == 2
    await daemon.generate("c", [8], 1)
    log = TokenLog.open(daemon.opened.contexts, "c")
    (conversation,) = daemon.conversations
    assert log.tokens().tolist() == conversation.tokens


async def test_sampling_is_the_seeds(daemon):
    given = {"tokens": [7, 8, 9], "max_tokens": 12, "temperature": 1.5}
    said = [(await daemon.call("generate", **given, seed=seed))["tokens"] for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


async def test_text_and_tokens_are_each_others(daemon, expected):
    for case in expected["tokenize"]:
        assert (await daemon.call("tokenize", text=case["text"]))["tokens"] == case["tokens"]
        assert (await daemon.call("detokenize", tokens=case["tokens"]))["text"] == case["text"]


async def test_a_fraction_is_rounded_up(daemon):
    await daemon.generate("c", [7] * 300, 1)
    result = await daemon.evict(1e-9)
    assert result["requested_bytes"] == 1
    assert result["freed_bytes"] > 0


async def test_the_trace_of_a_request_shows_every_lane(device, fixture_store, tmp_path):
    async with open_daemon(device, fixture_store, tmp_path, codec="int8") as daemon:
        await daemon.generate("c", [7] * 600, 1)
        await daemon.evict(0.9)
        await daemon.call("generate", context="c", tokens=[8], max_tokens=1, request="mine")
        events = (await daemon.call("trace", request="mine"))["events"]
        lanes = {event["name"].split()[0] for event in events if event["ph"] == "X"} | {
            event["args"]["name"].split()[0] for event in events if event["ph"] == "M" and event["args"]
        }
        assert {"allocate", "read", "decompress", "prefill"} <= lanes
        assert (await refused(daemon, "trace", request="nobody")).code == "not_found"
