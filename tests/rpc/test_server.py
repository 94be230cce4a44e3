"""Requests and answers: codes, pipelining, names, msgids, who is let in, how it ends."""

from __future__ import annotations

import logging
import os
import struct

import msgpack
import pytest
import trio

from mzd.errors import MzdError
from mzd.rpc.call import Method
from mzd.rpc.params import GENERATE, STATUS, TOKENIZE
from mzd.rpc.peers import PeerPolicy


async def status(_params, _call):
    return {"state": "idle"}


async def echo(params, _call):
    return {"text": params.prompt}


async def tokenize(params, _call):
    return {"tokens": [len(params.text)]}


METHODS = {
    "status": Method(STATUS, status),
    "generate": Method(GENERATE, echo),
    "tokenize": Method(TOKENIZE, tokenize),
}


def failing(error):
    async def fail(_params, _call):
        raise error

    return {**METHODS, "status": Method(STATUS, fail)}


async def test_a_request_gets_its_result(start):
    wire = await (await start(METHODS)).connect()
    assert await wire.call("status") == (None, {"state": "idle"})
    assert await wire.call("status", {}, msgid=(1 << 32) - 1) == (None, {"state": "idle"})
    assert await wire.call("generate", {"prompt": "hi"}) == (None, {"text": "hi"})


async def test_a_method_name_may_be_bin(start):
    wire = await (await start(METHODS)).connect()
    await wire.send([0, 1, b"status", []])
    assert await wire.response(1) == (None, {"state": "idle"})


async def test_unknown_methods_and_wrong_parameters_are_refused_and_the_connection_stays(start):
    wire = await (await start(METHODS)).connect()
    error, result = await wire.call("evaporate")
    assert (error["code"], result) == ("unknown_method", None)
    error, _ = await wire.call("generate", {"prompt": "x", "top_p": 5})
    assert (error["code"], error["data"]) == ("invalid_params", {"parameter": "top_p"})
    error, _ = await wire.call("cancel")
    assert (error["code"], error["data"]) == ("invalid_params", {"parameter": "request"})
    assert await wire.call("status") == (None, {"state": "idle"})


async def test_pipelined_requests_all_get_their_own_answer(start):
    wire = await (await start(METHODS)).connect()
    await wire.send(*([0, msgid, "generate", [{"prompt": str(msgid)}]] for msgid in range(200)))
    answers = [await wire.receive() for _ in range(200)]
    assert sorted((msgid, result["text"]) for _, msgid, _, result in answers) == [
        (msgid, str(msgid)) for msgid in range(200)
    ]


async def test_a_slow_request_does_not_hold_up_a_quick_one(start):
    release = trio.Event()

    async def slow(_params, _call):
        await release.wait()
        return {}

    wire = await (await start({**METHODS, "generate": Method(GENERATE, slow)})).connect()
    await wire.send([0, 1, "generate", [{"prompt": "x"}]], [0, 2, "status", []])
    assert (await wire.receive())[1] == 2
    release.set()
    assert (await wire.receive())[1] == 1


async def test_requests_split_over_many_writes(start):
    wire = await (await start(METHODS)).connect()
    for byte in msgpack.packb([0, 1, "generate", [{"prompt": "x" * 40}]]):
        await wire.stream.send_all(bytes([byte]))
    assert await wire.response(1) == (None, {"text": "x" * 40})


async def test_a_msgid_in_use_is_refused_and_both_connection_and_first_request_stay(start):
    release = trio.Event()

    async def slow(_params, _call):
        await release.wait()
        return {"text": "first"}

    wire = await (await start({**METHODS, "generate": Method(GENERATE, slow)})).connect()
    await wire.send([0, 1, "generate", [{"prompt": "x"}]], [0, 1, "status", []])
    error, _ = await wire.response(1)
    assert error["code"] == "invalid_request"
    release.set()
    assert await wire.response(1) == (None, {"text": "first"})


async def test_a_msgid_is_free_when_its_answer_is_read(start):
    wire = await (await start(METHODS)).connect()
    for _ in range(300):
        assert (await wire.call("status", msgid=1))[0] is None


async def test_two_connections_may_use_the_same_msgid(start):
    running = await start(METHODS)
    one, two = await running.connect(), await running.connect()
    assert await one.call("status") == await two.call("status")


@pytest.mark.parametrize(
    "raised",
    [
        MzdError("swap_full", "no room", free_bytes=5),
        ExceptionGroup("a handler's nursery", [MzdError("swap_full", "no room", free_bytes=5)]),
    ],
)
async def test_a_handlers_error_travels_whole(start, raised):
    wire = await (await start(failing(raised))).connect()
    error, _ = await wire.call("status")
    assert error == {"code": "swap_full", "message": "no room", "data": {"free_bytes": 5}}


@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("a secret path"),
        ExceptionGroup("two", [MzdError("busy", "a secret path"), RuntimeError("a secret path")]),
    ],
)
async def test_a_bug_is_internal_logged_and_kept_from_the_client(start, caplog, raised):
    wire = await (await start(failing(raised))).connect()
    with caplog.at_level(logging.ERROR):
        error, _ = await wire.call("status")
    assert error["code"] == "internal"
    assert "secret" not in repr(error)
    assert "Traceback" not in repr(error)
    assert any(record.exc_info and record.exc_info[1] is raised for record in caplog.records)
    assert await wire.call("tokenize", {"text": "abc"}) == (None, {"tokens": [3]})


async def test_a_result_that_cannot_be_sent_is_internal(start):
    async def broken(_params, _call):
        return {"handle": object()}

    wire = await (await start({**METHODS, "status": Method(STATUS, broken)})).connect()
    error, _ = await wire.call("status")
    assert error["code"] == "internal"


async def test_a_result_beyond_a_frame_is_said_to_be(start):
    async def long(params, _call):
        return {"text": "x" * params.max_tokens}

    wire = await (await start({"generate": Method(GENERATE, long)}, frame_bytes_max=1000)).connect()
    assert (await wire.call("generate", {"prompt": "", "max_tokens": 900}))[0] is None
    error, _ = await wire.call("generate", {"prompt": "", "max_tokens": 1000})
    assert error["code"] == "frame_too_large"
    assert (await wire.call("generate", {"prompt": "", "max_tokens": 900}))[0] is None


async def test_case_145_a_frame_too_large_is_told_even_while_it_is_being_sent(start):
    wire = await (await start(METHODS, frame_bytes_max=100_000)).connect()
    await wire.stream.send_all(
        b"\x94\x00\x01\xa8generate\x91\x81\xa6prompt\xdb" + struct.pack(">I", 4_000_000)
    )
    await wire.stream.send_all(b"x" * 4_000_000)
    [response] = await wire.rest()
    assert response[:2] == [1, None]
    assert response[2]["code"] == "frame_too_large"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x90",
        b"\x94\x00\xff\xa1x\x90",
        b"\x94\x01\x01\xc0\xc0",
        b"\x81\x01\x02",
    ],
)
async def test_garbage_is_answered_with_msgid_nil_and_closed(start, garbage):
    running = await start(METHODS)
    wire, other = await running.connect(), await running.connect()
    assert (await wire.call("status"))[0] is None
    await wire.stream.send_all(garbage)
    [response] = await wire.rest()
    assert response[:2] == [1, None]
    assert response[2]["code"] == "invalid_request"
    assert (await other.call("status"))[0] is None


async def test_a_stream_that_ends_inside_a_frame_is_told(start):
    wire = await (await start(METHODS)).connect()
    await wire.stream.send_all(b"\x94\x00\x01")
    await wire.stream.send_eof()
    [response] = await wire.rest()
    assert response[2]["code"] == "invalid_request"


async def test_what_ran_before_garbage_is_answered_first(start):
    async def forever(_params, call):
        call.partial_text = "so far"
        await trio.sleep_forever()

    wire = await (await start({**METHODS, "generate": Method(GENERATE, forever)})).connect()
    await wire.send([0, 1, "generate", [{"prompt": "x"}]], [0, 2, "status", []])
    assert (await wire.receive())[1] == 2
    await wire.stream.send_all(b"\xc1")
    first, last = await wire.rest()
    assert (first[1], first[2]["code"], first[2]["data"]) == (1, "cancelled", {"text": "so far"})
    assert (last[1], last[2]["code"]) == (None, "invalid_request")


async def test_unknown_and_wrong_notifications_are_ignored(start):
    wire = await (await start(METHODS)).connect()
    await wire.send([2, "hello", []], [2, "cancel", []], [2, "cancel", [{"request": 5}]], [2, "status", []])
    assert await wire.call("status") == (None, {"state": "idle"})


async def test_requests_of_one_connection_are_bounded(start):
    async def forever(_params, _call):
        await trio.sleep_forever()

    running = await start({**METHODS, "generate": Method(GENERATE, forever)}, requests_per_connection_max=3)
    wire, other = await running.connect(), await running.connect()
    await wire.send(*([0, msgid, "generate", [{"prompt": "x"}]] for msgid in range(4)))
    error, _ = await wire.response(3)
    assert error["code"] == "busy"
    assert (await wire.call("cancel", {"request": "1:0"}, msgid=9))[1] == {"cancelled": True}
    assert (await wire.response(0))[0]["code"] == "cancelled"
    assert (await wire.call("status", msgid=10))[0] is None
    assert (await other.call("status"))[0] is None


async def test_one_connection_too_many_is_told_busy(start):
    running = await start(METHODS, connections_max=3)
    wires = [await running.connect() for _ in range(3)]
    for wire in wires:
        await wire.call("status")
    [response] = await (await running.connect()).rest()
    assert (response[1], response[2]["code"]) == (None, "busy")
    await wires[0].stream.aclose()
    await running.until(connections=2)
    assert (await (await running.connect()).call("status"))[0] is None
    assert running.server.statistics().refused_connections == 1


async def test_256_connections_by_default(start):
    running = await start(METHODS)
    wires = [await running.connect() for _ in range(256)]
    for wire in wires:
        assert (await wire.call("status"))[0] is None
    [response] = await (await running.connect()).rest()
    assert response[2]["code"] == "busy"


async def test_long_unfinished_frames_are_bounded_over_all_connections(start):
    running = await start(METHODS, buffered_bytes_max=300_000)
    announce = b"\xdb" + struct.pack(">I", 1_000_000)
    first, second, small = [await running.connect() for _ in range(3)]
    await first.stream.send_all(announce + b"x" * 200_000)
    await running.until(buffered_bytes=200_005)
    await second.stream.send_all(announce + b"x" * 200_000)
    [response] = await second.rest()
    assert (response[1], response[2]["code"]) == (None, "busy")
    assert (await small.call("status"))[0] is None
    await first.stream.aclose()
    await running.until(connections=1, buffered_bytes=0)
    third = await running.connect()
    assert (await third.call("generate", {"prompt": "x" * 200_000}))[0] is None


async def test_strangers_are_told_and_closed(start):
    running = await start(METHODS, allowed=PeerPolicy(frozenset({os.geteuid() + 1})))
    [response] = await (await running.connect()).rest()
    assert (response[1], response[2]["code"]) == (None, "invalid_request")
    assert running.server.statistics().connections == 0


async def test_stop_answers_what_runs_and_ends_the_server(start):
    async def forever(_params, call):
        call.partial_text = "so far"
        await trio.sleep_forever()

    running = await start({**METHODS, "generate": Method(GENERATE, forever)})
    wire, idle = await running.connect(), await running.connect()
    await wire.send([0, 1, "generate", [{"prompt": "x"}]])
    await running.until(connections=2, running_requests=1)
    running.server.stop()
    [response] = await wire.rest()
    assert (response[1], response[2]["code"], response[2]["data"]) == (1, "cancelled", {"text": "so far"})
    assert await idle.rest() == []
    for client in (wire, idle):
        await client.stream.aclose()
    await running.until(connections=0, running_requests=0)
    with pytest.raises(OSError, match="refused"):
        await running.connect()
