"""Owns what becomes of a request: a result, an error with a code, `cancelled` or `internal`; one frame."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import trio

from mzd.errors import MzdError
from mzd.rpc.call import Call, Method
from mzd.rpc.limits import Limits
from mzd.rpc.protocol import encode_error, encode_result

log = logging.getLogger(__name__)


async def of_handler(method: Method[Any], params: Any, call: Call, limits: Limits) -> bytes:
    """Run a handler under the call's cancel scope; its response frame.

    A call that was cancelled before it starts never starts.

    Cancelled: from outside the call's scope, passes through; there is no response.
    """
    try:
        with call.scope:
            await trio.lowlevel.checkpoint_if_cancelled()
            return _encode(call.msgid, await method.handler(params, call), limits)
    except Exception as error:
        return encode_error(call.msgid, as_client_error(error))
    cancelled = MzdError("cancelled", f"request {call.request} was cancelled", text=call.partial_text)
    return encode_error(call.msgid, cancelled)


def of_sync(msgid: int, action: Callable[[], Any]) -> bytes:
    """The response frame of something that is done at once."""
    try:
        return encode_result(msgid, action())
    except Exception as error:
        return encode_error(msgid, as_client_error(error))


def as_client_error(error: Exception) -> MzdError:
    """An MzdError as it is, alone in its group or not; anything else is logged and told as `internal`."""
    leaf: BaseException = error
    while isinstance(leaf, BaseExceptionGroup) and len(leaf.exceptions) == 1:
        leaf = leaf.exceptions[0]
    if isinstance(leaf, MzdError):
        return leaf
    log.error("a request failed inside the daemon", exc_info=error)
    return MzdError("internal", "the daemon failed at this request; its log says where")


def _encode(msgid: int, result: Any, limits: Limits) -> bytes:
    frame = encode_result(msgid, result)
    if len(frame) > limits.frame_bytes_max:
        limit = limits.frame_bytes_max
        raise MzdError("frame_too_large", f"the result has {len(frame)} bytes, a frame {limit} at most")
    return frame
