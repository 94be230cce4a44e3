"""The grammar of the three messages."""

from __future__ import annotations

import msgpack
import pytest

from mzd.errors import MzdError
from mzd.rpc.framing import ProtocolError
from mzd.rpc.protocol import (
    Notification,
    Request,
    Response,
    decode_error,
    decode_message,
    encode_error,
    encode_notification,
    encode_request,
    encode_result,
)


def test_what_is_encoded_is_decoded():
    assert decode_message(encode_request(7, "m", {"a": 1})) == Request(7, "m", {"a": 1})
    assert decode_message(encode_request(7, "m", {})) == Request(7, "m", {})
    assert decode_message(encode_notification("n", {"a": 1})) == Notification("n", {"a": 1})
    assert decode_message(encode_result(7, [1])) == Response(7, None, [1])


def test_requests_look_as_the_specification_says():
    assert msgpack.unpackb(encode_request(7, "m", {})) == [0, 7, "m", []]
    assert msgpack.unpackb(encode_request(7, "m", {"a": 1})) == [0, 7, "m", [{"a": 1}]]


def test_a_method_sent_as_bin_is_read_as_utf8():
    assert decode_message(msgpack.packb([0, 1, "möd".encode(), []])).method == "möd"


@pytest.mark.parametrize("msgid", [0, 1, (1 << 32) - 1])
def test_msgids(msgid):
    assert decode_message(msgpack.packb([0, msgid, "m", []])).msgid == msgid


NO_MESSAGES = [
    None, 5, "GET / HTTP/1.1", {}, [], [0], [0, 1], [0, 1, "m"], [0, 1, "m", [], 5], [2], [2, "m"],
    [2, "m", [], 1],
    [3, 1, "m", []], [-1, 1, "m", []], [False, 1, "m", []], [0.0, 1, "m", []], ["0", 1, "m", []],
    [0, -1, "m", []], [0, 1 << 32, "m", []], [0, 1.0, "m", []], [0, "1", "m", []], [0, None, "m", []],
    [0, True, "m", []], [0, 1, 5, []], [0, 1, None, []], [0, 1, ["m"], []],
    [0, 1, "m", {}], [0, 1, "m", None], [0, 1, "m", [1]], [0, 1, "m", [None]], [0, 1, "m", [{}, {}]],
    [0, 1, "m", [[]]], [0, 1, "m", [{b"key": 1}]], [0, 1, "m", [{1: 1}]], [0, 1, "m", [{"a": {1: 1}}]],
    [2, 5, []], [2, "m", {}], [1, -1, None, 1],
]  # fmt: skip


@pytest.mark.parametrize("message", NO_MESSAGES, ids=repr)
def test_what_is_no_message_is_refused(message):
    with pytest.raises(ProtocolError) as caught:
        decode_message(msgpack.packb(message))
    assert caught.value.code == "invalid_request"


def test_errors_travel_whole():
    sent = MzdError("swap_full", "no room", free_bytes=5)
    response = decode_message(encode_error(3, sent))
    assert response == Response(
        3, {"code": "swap_full", "message": "no room", "data": {"free_bytes": 5}}, None
    )
    received = decode_error(response.error)
    assert (received.code, received.message, received.data) == ("swap_full", "no room", {"free_bytes": 5})


@pytest.mark.parametrize("fact", [object(), 1 << 70, {1, 2}, b"\xff", "\udcff", [[[[]]]]])
def test_any_fact_can_be_sent_somehow(fact):
    assert (
        decode_message(encode_error(None, MzdError("internal", "x", fact=fact))).error["code"] == "internal"
    )


def test_a_fact_nested_without_end_can_be_sent_too():
    loop: list[object] = []
    loop.append(loop)
    assert decode_message(encode_error(1, MzdError("internal", "x", fact=loop))).error["code"] == "internal"


def test_facts_named_like_the_error_itself_do_no_harm():
    received = decode_error({"code": "a", "message": "b", "data": {"code": 1, "message": 2, "self": 3}})
    assert received.data == {"code": 1, "message": 2, "self": 3}


@pytest.mark.parametrize("value", [None, 5, "x", {}, {"code": 5}])
def test_an_error_of_another_form_is_told(value):
    assert decode_error(value).code == "internal"
