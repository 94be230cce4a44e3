"""Owns one running request: its name, its cancel scope, its way back to the client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import trio

from mzd.errors import MzdError
from mzd.rpc.params import ParamsSchema
from mzd.rpc.protocol import encode_notification

P = TypeVar("P")


@dataclass(slots=True)
class Call:
    """What a handler knows of the request it serves.

    Attributes:
        request: the client's name for it, else `CONNECTION:MSGID`; unique among the running ones.
        msgid: its number on its connection.
        received_s: `trio.current_time()` when its last byte had been read; TTFT counts from here.
        partial_text: what was said so far; goes out as `data.text` when the request is cancelled.
    """

    request: str
    msgid: int
    received_s: float
    outbox: trio.MemorySendChannel[bytes] = field(repr=False)
    partial_text: str = ""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope, repr=False)

    async def notify(self, method: str, params: Mapping[str, Any]) -> None:
        """Send a notification about this request; `request` is added to `params`.

        Waits while the client does not read, which holds this request back and no other client's.

        Cancelled: the notification was not sent; the stream stays whole.
        """
        await self.outbox.send(encode_notification(method, {"request": self.request, **params}))


@dataclass(frozen=True, slots=True)
class Method(Generic[P]):
    """One method of the daemon: what it takes, and who does it.

    `handler` returns what MessagePack can hold. An MzdError it raises goes to the client; any other exception
    is logged and becomes `internal`. It is cancelled by `cancel` and when its client goes away.
    """

    schema: ParamsSchema[P]
    handler: Callable[[P, Call], Awaitable[Any]]


class RunningCalls:
    """All running requests of all connections, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, call: Call) -> None:
        """Enter a request.

        Raises:
            MzdError: `invalid_params` when its name is in use.
        """
        if call.request in self._by_name:
            raise MzdError("invalid_params", f"request {call.request!r} is in use", parameter="request")
        self._by_name[call.request] = call

    def remove(self, call: Call) -> None:
        """Forget a request that has its outcome; its name is free."""
        del self._by_name[call.request]

    def cancel(self, request: str) -> bool:
        """End that request and no other; False when it does not run."""
        call = self._by_name.get(request)
        if call is None:
            return False
        call.scope.cancel()
        return True
