"""The asynchronous client against the real server."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from mzd.errors import MzdError
from mzd.rpc.call import Method
from mzd.rpc.client import NoDaemonError, open_rpc_client
from mzd.rpc.params import GENERATE, STATUS, TRACE
from mzd.rpc.peers import PeerPolicy


async def status(_params, _call):
    return {"state": "idle"}


async def count(params, call):
    for number in range(params.max_tokens):
        await call.notify("token", {"text": str(number), "token": number})
    return {"text": params.prompt}


async def forever(_params, call):
    call.partial_text = "so far"
    await trio.sleep_forever()


METHODS = {"status": Method(STATUS, status), "generate": Method(GENERATE, count)}


async def test_calls_results_and_errors(start):
    running = await start(METHODS)
    async with open_rpc_client(str(running.path)) as client:
        assert await client.call("status") == {"state": "idle"}
        with pytest.raises(MzdError) as caught:
            await client.call("generate", {"prompt": "x", "top_p": 7})
        assert (caught.value.code, caught.value.data) == ("invalid_params", {"parameter": "top_p"})
        assert await client.call("status") == {"state": "idle"}
    await running.until(connections=0)


async def test_each_call_gets_its_own_notifications(start):
    running = await start(METHODS)
    seen: dict[str, list[int]] = {"a": [], "b": []}

    async def call(client, name, tokens):
        async def take(method, params):
            assert method == "token"
            seen[name].append(params["token"])

        result = await client.call("generate", {"prompt": name, "max_tokens": tokens}, on_notification=take)
        assert result == {"text": name}
        assert seen[name] == list(range(tokens))

    async with open_rpc_client(str(running.path)) as client, trio.open_nursery() as calls:
        calls.start_soon(call, client, "a", 100)
        calls.start_soon(call, client, "b", 50)


async def test_a_cancelled_call_is_cancelled_at_the_daemon_and_the_connection_stays(start):
    running = await start({**METHODS, "generate": Method(GENERATE, forever)})
    async with open_rpc_client(str(running.path)) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.call, "generate", {"prompt": "x"})
            await running.until(running_requests=1)
            nursery.cancel_scope.cancel()
        await running.until(running_requests=0)
        assert await client.call("status") == {"state": "idle"}


async def test_giving_up_a_trace_of_a_request_does_not_cancel_the_request(start):
    trace = Method(TRACE, forever)
    running = await start({**METHODS, "generate": Method(GENERATE, forever), "trace": trace})
    async with open_rpc_client(str(running.path)) as client, trio.open_nursery() as nursery:
        nursery.start_soon(client.call, "generate", {"prompt": "x", "request": "mine"})
        await running.until(running_requests=1)
        async with trio.open_nursery() as impatient:
            impatient.start_soon(client.call, "trace", {"request": "mine"})
            await running.until(running_requests=2)
            impatient.cancel_scope.cancel()
        assert await client.call("cancel", {"request": "mine"}) == {"cancelled": True}
        nursery.cancel_scope.cancel()


async def test_an_error_in_the_block_comes_out_as_itself(start):
    running = await start(METHODS)
    with pytest.raises(MzdError) as caught:
        async with open_rpc_client(str(running.path)) as client:
            await client.call("evaporate")
    assert caught.value.code == "unknown_method"


async def test_no_daemon(tmp_path):
    with pytest.raises(NoDaemonError):
        async with open_rpc_client(str(tmp_path / "none")):
            raise AssertionError("unreachable")


async def test_a_daemon_that_stops_fails_what_waits_and_what_comes(start):
    running = await start({**METHODS, "generate": Method(GENERATE, forever)})
    async with open_rpc_client(str(running.path)) as client:
        async with trio.open_nursery() as nursery:

            async def call():
                with pytest.raises(MzdError) as caught:
                    await client.call("generate", {"prompt": "x"})
                assert (caught.value.code, caught.value.data) == ("cancelled", {"text": "so far"})

            nursery.start_soon(call)
            await running.until(running_requests=1)
            running.server.stop()
        await running.until(connections=0)
        with pytest.raises(NoDaemonError):
            await client.call("status")


async def test_a_refusal_reaches_the_caller(start):
    running = await start(METHODS, allowed=PeerPolicy(frozenset()))
    async with open_rpc_client(str(running.path)) as client:
        with pytest.raises(MzdError) as caught:
            await client.call("status")
    assert caught.value.code == "invalid_request"
