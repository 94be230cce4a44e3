"""Owns the listening side: who is let in, how many, and how all of them end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import trio

from mzd.errors import MzdError
from mzd.rpc.call import Method, RunningCalls
from mzd.rpc.connection import Connection, ReadBudget, Shared
from mzd.rpc.limits import Limits
from mzd.rpc.peers import PeerPolicy
from mzd.rpc.protocol import encode_error

log = logging.getLogger(__name__)

# The socket of a client that is turned away is new: its buffer takes one frame at once, or never.
_REFUSAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """What is open now, and what was turned away since the start."""

    connections: int
    running_requests: int
    refused_connections: int
    buffered_bytes: int


class RpcServer:
    """MessagePack-RPC for all clients of the daemon. `cancel` is its own; the other methods are given.

    Args:
        methods: name to Method; `cancel` is not among them.
    """

    def __init__(
        self, methods: Mapping[str, Method[Any]], *, allowed: PeerPolicy, limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._allowed = allowed
        self._calls = RunningCalls()
        self._shared = Shared(methods, self._limits, self._calls, ReadBudget(self._limits.buffered_bytes_max))
        self._connections: set[Connection] = set()
        self._numbers = count(1)
        self._refused = 0
        self._accepting = trio.CancelScope()

    def statistics(self) -> ServerStatistics:
        """A snapshot."""
        return ServerStatistics(
            len(self._connections), len(self._calls), self._refused, self._shared.budget.held_bytes
        )

    def stop(self) -> None:
        """Accept no more and end every connection: what runs is answered with `cancelled`.

        `serve` returns when all are gone, within `farewell_s`.
        """
        self._accepting.cancel()
        for connection in self._connections:
            connection.stop()

    async def serve(
        self,
        listeners: Sequence[trio.SocketListener],
        *,
        task_status: trio.TaskStatus[list[trio.SocketListener]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve clients until `stop()`; closes the listeners, leaves their files.

        Cancelled: every connection is closed without a word; `stop()` is the polite way.
        """
        async with trio.open_nursery() as connections:
            with self._accepting:
                await trio.serve_listeners(
                    self._serve_client, list(listeners), handler_nursery=connections, task_status=task_status
                )

    async def _serve_client(self, stream: trio.SocketStream) -> None:
        try:
            self._admit(stream)
        except MzdError as error:
            self._refused += 1
            log.warning("connection refused: %s", error)
            await _turn_away(stream, error)
        else:
            await self._run(Connection(stream, next(self._numbers), self._shared))

    def _admit(self, stream: trio.SocketStream) -> None:
        """Let a client in or raise why not."""
        self._allowed.check(stream.socket)
        if len(self._connections) >= self._limits.connections_max:
            limit = self._limits.connections_max
            raise MzdError("busy", f"there are {limit} connections already", connections_max=limit)

    async def _run(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._accepting.cancel_called:
            connection.stop()
        try:
            await connection.run()
        except Exception:  # a bug of ours ends one connection, not the daemon
            log.exception("a connection failed inside the daemon")
        finally:
            self._connections.discard(connection)


async def _turn_away(stream: trio.SocketStream, error: MzdError) -> None:
    """Say why, and close."""
    with trio.move_on_after(_REFUSAL_S):
        async with stream:
            try:
                await stream.send_all(encode_error(None, error))
            except trio.BrokenResourceError:
                log.info("a refused client had left already")
