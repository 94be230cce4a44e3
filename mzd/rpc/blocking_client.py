"""Owns the blocking client of the command line. It needs no Trio, so that `mzd status` starts fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Any, Self

from mzd.rpc.endpoint import NoDaemonError, connect_socket
from mzd.rpc.framing import FrameReader
from mzd.rpc.limits import CLIENT_LIMITS
from mzd.rpc.protocol import (
    Message,
    Notification,
    Response,
    decode_error,
    decode_message,
    encode_notification,
    encode_request,
)

OnNotification = Callable[[str, Mapping[str, Any]], None]
_READ_BYTES = 64 * 1024


class BlockingClient:
    """One connection, one call at a time. A context manager; closing cancels what still runs.

    Raises:
        NoDaemonError: nobody listens at `path`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._frames = FrameReader(CLIENT_LIMITS)
        self._msgids = count(1)
        self._socket = connect_socket(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Call a method and wait for its result.

        Raises:
            MzdError: the daemon's error; `no_daemon` when it goes away meanwhile.
        """
        return self.wait(self.start(method, params or {}))

    def start(self, method: str, params: Mapping[str, Any]) -> int:
        """Send a request; `wait` for its msgid gets the result."""
        msgid = next(self._msgids)
        self._send(encode_request(msgid, method, params))
        return msgid

    def wait(self, msgid: int, on_notification: OnNotification | None = None) -> Any:
        """Read until the response to `msgid`; each notification on the way goes to the callback.

        Raises:
            MzdError: the daemon's error; `no_daemon` when it goes away meanwhile.
        """
        while True:
            match self._next_message():
                case Response(msgid=None, error=error):
                    raise decode_error(error)
                case Response(msgid=number, error=error, result=result) if number == msgid:
                    if error is not None:
                        raise decode_error(error)
                    return result
                case Notification(method=method, params=params) if on_notification is not None:
                    on_notification(method, params)

    def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a notification. A signal handler may, while the program waits in `wait`."""
        self._send(encode_notification(method, params))

    def _send(self, frame: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # reading tells why: it may have said so
            self._socket.sendall(frame)

    def _next_message(self) -> Message:
        while (frame := self._frames.next_frame()) is None:
            self._frames.feed(self._receive())
        return decode_message(frame)

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise NoDaemonError(self._path, "it closed the connection")
        return data


def call_daemon(path: str, method: str, params: Mapping[str, Any] | None = None) -> Any:
    """One call over its own connection.

    Raises:
        MzdError: the daemon's error, or `no_daemon`.
    """
    with BlockingClient(path) as client:
        return client.call(method, params)
