"""Owns one client's connection: reading requests, running each as a task, writing answers, and its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio

from mzd.errors import MzdError
from mzd.rpc import outcome
from mzd.rpc.call import Call, Method, RunningCalls
from mzd.rpc.framing import FrameReader, ProtocolError
from mzd.rpc.limits import Limits
from mzd.rpc.params import CANCEL
from mzd.rpc.protocol import Message, Notification, Request, decode_message, encode_error

log = logging.getLogger(__name__)

# One read: what a connection may always hold, and the longest scan between two checkpoints: 5 ms at 80 ns
# a byte.
READ_BYTES = 64 * 1024
# One write: a client must take this much within `stall_s`.
_WRITE_BYTES = 64 * 1024


class ReadBudget:
    """Bytes of unfinished frames, over all connections. One writer each: the connection that holds them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[int, int] = {}
        self._total = 0

    @property
    def held_bytes(self) -> int:
        """What all connections hold beyond their first read."""
        return self._total

    def hold(self, connection: int, size_bytes: int) -> None:
        """Set what a connection holds; up to one read is free.

        Raises:
            ProtocolError: `busy` when all connections together would hold too much.
        """
        counted = size_bytes if size_bytes > READ_BYTES else 0
        total = self._total - self._held.get(connection, 0) + counted
        if counted and total > self._bytes_max:
            raise ProtocolError("busy", "too many long requests arrive at once", bytes_max=self._bytes_max)
        self._total = total
        self._held[connection] = counted

    def forget(self, connection: int) -> None:
        """The connection is gone."""
        self._total -= self._held.pop(connection, 0)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all connections of one server have in common."""

    methods: Mapping[str, Method[Any]]
    limits: Limits
    calls: RunningCalls
    budget: ReadBudget


class Connection:
    """One client.

    A reader task enters requests in order of arrival, a task per request runs it, one writer task owns the
    stream's sending side; so a cancelled request never leaves half a frame behind. The outbox between them is
    short: requests of a client that does not read wait there, and after `stall_s` the client is closed.

    Ends when the client leaves or breaks the protocol, or by `stop()`: its requests are cancelled at once and
    answered, a breach is named, all within `farewell_s`. A client that left cannot take it; that is noticed.

    Args:
        number: the CONNECTION in `CONNECTION:MSGID`.
    """

    def __init__(self, stream: trio.SocketStream, number: int, shared: Shared) -> None:
        self._stream = stream
        self._number = number
        self._shared = shared
        self._running: dict[int, Call] = {}
        self._num_tasks = 0  # those whose answer still waits in the outbox included
        self._reading = trio.CancelScope()
        self._outbox, self._outgoing = trio.open_memory_channel[bytes](shared.limits.outbox_frames_max)

    def stop(self) -> None:
        """Read no more, answer what runs with `cancelled`, close."""
        self._reading.cancel()

    async def run(self) -> None:
        """Serve the client until either side ends it; closes the stream."""
        async with self._stream, self._outgoing, trio.open_nursery() as nursery:
            nursery.start_soon(self._write_frames, nursery.cancel_scope)
            try:
                async with self._outbox:
                    await self._serve(nursery.cancel_scope)
            finally:
                self._shared.budget.forget(self._number)

    async def _serve(self, everything: trio.CancelScope) -> None:
        ending: ProtocolError | None = None
        async with trio.open_nursery() as requests:
            try:
                with self._reading:
                    await self._read_frames(requests)
            except ProtocolError as error:
                log.info("connection %d closed: %s", self._number, error)
                ending = error
            everything.deadline = trio.current_time() + self._shared.limits.farewell_s
            for call in self._running.values():
                call.scope.cancel()
        if ending is not None:
            await self._outbox.send(encode_error(None, ending))

    async def _read_frames(self, requests: trio.Nursery) -> None:
        """Read until the client's end of file.

        Raises:
            ProtocolError: what it sent cannot be read on.
        """
        frames = FrameReader(self._shared.limits)
        while data := await self._receive():
            frames.feed(data)
            while (frame := frames.next_frame()) is not None:
                await self._dispatch(decode_message(frame), requests)
                await trio.lowlevel.checkpoint()  # a flood of small frames holds no other client up
            self._shared.budget.hold(self._number, frames.buffered_bytes)
        if frames.buffered_bytes:
            raise ProtocolError("invalid_request", "the stream ends inside a frame")

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(READ_BYTES))
        except trio.BrokenResourceError:
            return b""

    async def _dispatch(self, message: Message, requests: trio.Nursery) -> None:
        match message:
            case Request(method="cancel"):
                # Here, not in a task: it must find what came before it and nothing that came after.
                await self._outbox.send(outcome.of_sync(message.msgid, lambda: self._cancel(message.params)))
            case Request():
                await self._start(message, requests)
            case Notification():
                self._take_notification(message)
            case _:
                raise ProtocolError("invalid_request", "a response came, but the daemon asked nothing")

    def _cancel(self, params: Mapping[str, Any]) -> dict[str, bool]:
        return {"cancelled": self._shared.calls.cancel(CANCEL.parse(params).request)}

    def _take_notification(self, notification: Notification) -> None:
        if notification.method != "cancel":
            return  # the specification: those that the daemon does not know are ignored
        try:
            self._cancel(notification.params)
        except MzdError as error:  # a notification has no answer
            log.info("connection %d: cancel ignored: %s", self._number, error)

    async def _start(self, request: Request, requests: trio.Nursery) -> None:
        try:
            method, params, call = self._admit(request)
        except MzdError as error:
            await self._outbox.send(encode_error(request.msgid, error))
        else:
            self._num_tasks += 1
            requests.start_soon(self._serve_request, method, params, call)

    def _admit(self, request: Request) -> tuple[Method[Any], Any, Call]:
        """Check a request and enter it among the running ones.

        Raises:
            MzdError: `invalid_request`, `busy`, `unknown_method` or `invalid_params`.
        """
        if request.msgid in self._running:
            raise MzdError("invalid_request", f"msgid {request.msgid} is in use", msgid=request.msgid)
        if self._num_tasks >= self._shared.limits.requests_per_connection_max:
            raise MzdError("busy", "this connection has too many requests running", running=self._num_tasks)
        method = self._shared.methods.get(request.method)
        if method is None:
            raise MzdError("unknown_method", f"there is no method {request.method[:64]!r}")
        params = method.schema.parse(request.params)
        chosen = params.request if method.schema.names_request else None
        name = chosen or f"{self._number}:{request.msgid}"
        call = Call(name, request.msgid, trio.current_time(), self._outbox)
        self._shared.calls.add(call)
        self._running[request.msgid] = call
        return method, params, call

    async def _serve_request(self, method: Method[Any], params: Any, call: Call) -> None:
        try:
            try:
                response = await outcome.of_handler(method, params, call, self._shared.limits)
            finally:  # before the client can know: it may use msgid and name again at once
                self._shared.calls.remove(call)
                del self._running[call.msgid]
            await self._outbox.send(response)
        finally:
            self._num_tasks -= 1

    async def _write_frames(self, everything: trio.CancelScope) -> None:
        """Write until the outbox is closed and empty, or the client cannot take it."""
        try:
            async for frame in self._outgoing:
                await self._write(memoryview(frame))
            await self._linger()
        except trio.BrokenResourceError:
            everything.cancel()
        except trio.TooSlowError:
            stall_s = self._shared.limits.stall_s
            log.warning("connection %d closed: it read nothing for %g s", self._number, stall_s)
            everything.cancel()

    async def _write(self, frame: memoryview) -> None:
        for start in range(0, len(frame), _WRITE_BYTES):
            with trio.fail_after(self._shared.limits.stall_s):
                await self._stream.send_all(frame[start : start + _WRITE_BYTES])

    async def _linger(self) -> None:
        """Throw away what the client still sends, so that it gets to read why it is closed."""
        await self._stream.send_eof()
        with trio.move_on_after(self._shared.limits.linger_s):
            while await self._receive():
                pass
