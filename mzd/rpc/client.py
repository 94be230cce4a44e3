"""Owns the asynchronous client: any number of calls in flight over one connection, for Trio programs."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import trio

from mzd.errors import MzdError
from mzd.rpc.endpoint import NoDaemonError, connect_socket, default_socket_path
from mzd.rpc.framing import FrameReader
from mzd.rpc.limits import CLIENT_LIMITS
from mzd.rpc.params import SCHEMAS
from mzd.rpc.protocol import (
    MSGID_MAX,
    Message,
    Notification,
    Response,
    decode_error,
    decode_message,
    encode_notification,
    encode_request,
)

__all__ = ["NoDaemonError", "RpcClient", "default_socket_path", "open_rpc_client"]

OnNotification = Callable[[str, Mapping[str, Any]], Awaitable[None]]
_READ_BYTES = 64 * 1024


@dataclass(slots=True)
class _Pending:
    """A call that waits for its response."""

    name: str | None
    on_notification: OnNotification | None
    done: trio.Event = field(default_factory=trio.Event)
    response: Response | None = None


class RpcClient:
    """One connection. Made by `open_rpc_client`, which owns its tasks.

    Notifications are handed to their call's callback one after the other, so a slow callback holds back
    everything on this connection: open one connection for each stream that may be slow.
    """

    def __init__(self, stream: trio.SocketStream, path: str) -> None:
        self._stream = stream
        self._path = path
        self._pending: dict[int, _Pending] = {}
        self._msgids = count(1)
        self._lost: MzdError | None = None
        self._outbox, self._outgoing = trio.open_memory_channel[bytes](8)

    async def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        on_notification: OnNotification | None = None,
    ) -> Any:
        """Call a method and wait for its result.

        Args:
            params: a `generate` without a `request` name is given one.
            on_notification: gets (method, params) of each notification about this `generate`.

        Raises:
            MzdError: the daemon's error; `no_daemon` when the connection is lost.

        Cancelled: the daemon is told to cancel it, if it is a `generate`; any other runs on unheard.
        """
        params = dict(params or {})
        msgid = next(self._msgids) & MSGID_MAX
        names_itself = method in SCHEMAS and SCHEMAS[method].names_request
        if names_itself:  # elsewhere `request` is the name of another call
            params["request"] = params.get("request") or f"{os.getpid()}-{os.urandom(6).hex()}"
        pending = _Pending(params["request"] if names_itself else None, on_notification)
        response = await self._exchange(msgid, encode_request(msgid, method, params), pending)
        if response.error is not None:
            raise decode_error(response.error)
        return response.result

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a notification; there is no answer."""
        await self._outbox.send(encode_notification(method, params))

    async def _exchange(self, msgid: int, frame: bytes, pending: _Pending) -> Response:
        self._pending[msgid] = pending
        try:
            self._check_open()
            await self._outbox.send(frame)
            await pending.done.wait()
        except trio.Cancelled:
            await self._cancel(pending)
            raise
        finally:
            del self._pending[msgid]
        self._check_open(pending.response)
        assert pending.response is not None
        return pending.response

    def _check_open(self, response: Response | None = None) -> None:
        if response is None and self._lost is not None:
            raise self._lost

    async def _cancel(self, pending: _Pending) -> None:
        if pending.name is not None and self._lost is None:
            with trio.move_on_after(1, shield=True):
                await self.notify("cancel", {"request": pending.name})

    async def read_messages(self) -> None:
        """Serve the receiving side until the connection ends; then every waiting call fails."""
        try:
            await self._read_frames()
            self._lost = NoDaemonError(self._path, "it closed the connection")
        except trio.BrokenResourceError:
            self._lost = NoDaemonError(self._path, "the connection broke")
        except MzdError as error:  # it refused us, or what it sends cannot be read
            self._lost = error
        for pending in self._pending.values():
            pending.done.set()

    async def _read_frames(self) -> None:
        frames = FrameReader(CLIENT_LIMITS)
        while data := await self._stream.receive_some(_READ_BYTES):
            frames.feed(data)
            while (frame := frames.next_frame()) is not None:
                await self._take(decode_message(frame))

    async def _take(self, message: Message) -> None:
        match message:
            case Response(msgid=None, error=error):
                raise decode_error(error)
            case Response(msgid=int(msgid)) if msgid in self._pending:
                self._pending[msgid].response = message
                self._pending[msgid].done.set()
            case Notification():
                await self._hand_over(message)

    async def _hand_over(self, notification: Notification) -> None:
        name = notification.params.get("request")
        for pending in list(self._pending.values()):
            if pending.on_notification is not None and pending.name == name:
                await pending.on_notification(notification.method, notification.params)

    async def write_frames(self) -> None:
        """Serve the sending side; the only task that writes, so that no frame is ever cut."""
        async for frame in self._outgoing:
            # After the end frames are thrown away, so that no caller waits here: the reading side tells them.
            with suppress(trio.BrokenResourceError):
                await self._stream.send_all(frame)


@asynccontextmanager
async def open_rpc_client(path: str | None = None) -> AsyncIterator[RpcClient]:
    """Connect to the daemon for the block. Leaving it closes the connection, which cancels what still runs.

    Args:
        path: the socket; `default_socket_path()` when not given.

    Raises:
        NoDaemonError: nobody listens there.
    """
    path = path or default_socket_path()
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(connect_socket(path)))
    client = RpcClient(stream, path)
    try:
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(client.read_messages)
            nursery.start_soon(client.write_frames)
            yield client
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None  # the nursery is our detail: callers catch their MzdError
