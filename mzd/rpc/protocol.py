"""Owns the three messages of MessagePack-RPC: their grammar, and how they become frames and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from mzd.errors import MzdError
from mzd.rpc.framing import ProtocolError, unpack_frame

MSGID_MAX = (1 << 32) - 1
_REQUEST, _RESPONSE, _NOTIFICATION = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Request:
    """`[0, msgid, method, params]`."""

    msgid: int
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """`[1, msgid, error, result]`; msgid None answers what could not be read as a request."""

    msgid: int | None
    error: Any
    result: Any


@dataclass(frozen=True, slots=True)
class Notification:
    """`[2, method, params]`."""

    method: str
    params: Mapping[str, Any]


Message = Request | Response | Notification


def decode_message(frame: bytes | bytearray) -> Message:
    """Read one frame.

    Raises:
        ProtocolError: `invalid_request` when the frame is none of the three.
    """
    match unpack_frame(frame):
        case [int(kind), msgid, method, params] if _is(kind, _REQUEST):
            return Request(_msgid(msgid), _method(method), _params(params))
        case [int(kind), method, params] if _is(kind, _NOTIFICATION):
            return Notification(_method(method), _params(params))
        case [int(kind), msgid, error, result] if _is(kind, _RESPONSE):
            return Response(None if msgid is None else _msgid(msgid), error, result)
    raise ProtocolError("invalid_request", "a frame is neither request, response nor notification")


def _is(kind: int, wanted: int) -> bool:
    return type(kind) is int and kind == wanted  # True is no 1 on this wire


def _msgid(value: object) -> int:
    if type(value) is int and 0 <= value <= MSGID_MAX:
        return value
    raise ProtocolError("invalid_request", "a msgid is an unsigned 32-bit number")


def _method(value: object) -> str:
    if isinstance(value, bytes):  # clients whose library knows no str
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return value
    raise ProtocolError("invalid_request", "a method is a string")


def _params(value: object) -> Mapping[str, Any]:
    match value:
        case []:
            return {}
        case [dict(params)] if all(isinstance(key, str) for key in params):
            return params
    raise ProtocolError("invalid_request", "params are [] or an array with one map that has string keys")


def encode_request(msgid: int, method: str, params: Mapping[str, Any]) -> bytes:
    """A request frame. Raises TypeError or ValueError for what MessagePack cannot hold."""
    return _pack([_REQUEST, msgid, method, _params_array(params)])


def encode_notification(method: str, params: Mapping[str, Any]) -> bytes:
    """A notification frame. Raises TypeError or ValueError for what MessagePack cannot hold."""
    return _pack([_NOTIFICATION, method, _params_array(params)])


def encode_result(msgid: int, result: Any) -> bytes:
    """A response frame with a result. Raises TypeError or ValueError for what MessagePack cannot hold."""
    return _pack([_RESPONSE, msgid, None, result])


def encode_error(msgid: int | None, error: MzdError) -> bytes:
    """A response frame with an error. Facts in `data` that MessagePack does not know are sent as text."""
    data = {str(key): value for key, value in error.data.items()}
    try:
        frame = msgpack.packb(_error_message(msgid, error, data), unicode_errors="replace", default=str)
    except (ValueError, OverflowError):  # nested too deeply, or a number of more than 64 bits
        frame = msgpack.packb(_error_message(msgid, error, {"data": str(data)}), unicode_errors="replace")
    return bytes(frame)


def _error_message(msgid: int | None, error: MzdError, data: Mapping[str, Any]) -> list[Any]:
    return [_RESPONSE, msgid, {"code": error.code, "message": error.message, "data": data}, None]


def decode_error(value: Any) -> MzdError:
    """The error of a response, as the exception that a caller raises."""
    if not isinstance(value, Mapping) or not isinstance(value.get("code"), str):
        return MzdError("internal", f"the daemon sent an error of an unknown form: {value!r}")
    error = MzdError(value["code"], str(value.get("message", "")))
    data = value.get("data")
    error.data = data if isinstance(data, Mapping) else {}  # its keys may be any, `code` too
    return error


def _params_array(params: Mapping[str, Any]) -> list[Any]:
    return [dict(params)] if params else []


def _pack(message: list[Any]) -> bytes:
    return bytes(msgpack.packb(message, unicode_errors="replace"))
