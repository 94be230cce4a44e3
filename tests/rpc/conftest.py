"""A real RpcServer on a Unix socket in tmp_path, and a client that can send anything."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from mzd.rpc.call import Method
from mzd.rpc.endpoint import bind_socket
from mzd.rpc.limits import Limits
from mzd.rpc.peers import PeerPolicy
from mzd.rpc.server import RpcServer


class Wire:
    """One connection, seen from the client: any bytes out, whole messages in."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._unpacker = msgpack.Unpacker(raw=False)

    async def send(self, *messages: Any) -> None:
        await self.stream.send_all(b"".join(msgpack.packb(message) for message in messages))

    async def receive(self) -> Any:
        """The next message, None at the end."""
        while True:
            with contextlib.suppress(msgpack.OutOfData):
                return self._unpacker.unpack()
            try:
                with trio.fail_after(60):
                    data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._unpacker.feed(data)

    async def call(self, method: str, params: Mapping[str, Any] | None = None, *, msgid: int = 1) -> Any:
        """(error, result) of one request, notifications skipped."""
        await self.send([0, msgid, method, [params] if params is not None else []])
        return await self.response(msgid)

    async def response(self, msgid: int | None) -> tuple[Any, Any]:
        while (message := await self.receive()) is not None:
            if message[0] == 1 and message[1] == msgid:
                return message[2], message[3]
        raise AssertionError(f"closed before the response to {msgid}")

    async def rest(self) -> list[Any]:
        """Every message until the server closes."""
        messages = []
        while (message := await self.receive()) is not None:
            messages.append(message)
        return messages


@dataclass
class Running:
    """A server that runs, and ways to reach it."""

    server: RpcServer
    path: Path
    wires: list[Wire] = field(default_factory=list)

    async def connect(self) -> Wire:
        wire = Wire(await trio.open_unix_socket(self.path))
        self.wires.append(wire)
        return wire

    async def until(self, *, poll_s: float = 0.001, **wanted: int) -> None:
        """Wait until the server's statistics hold these figures."""
        for _ in range(10_000):
            now = self.server.statistics()
            if all(getattr(now, name) == value for name, value in wanted.items()):
                return
            await trio.sleep(poll_s)
        raise AssertionError(f"{now} never had {wanted}")


@pytest.fixture
async def start(tmp_path, nursery):
    """start(methods, **limits) -> Running. Everything ends with the test."""
    nursery.cancel_scope.deadline = trio.current_time() + 2000  # virtual time in some tests
    started: list[Running] = []

    async def start_server(
        methods: Mapping[str, Method[Any]], *, allowed: PeerPolicy | None = None, **limits: Any
    ) -> Running:
        server = RpcServer(methods, allowed=allowed or PeerPolicy.same_user(), limits=Limits(**limits))
        path = tmp_path / f"{len(started)}.sock"
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bind_socket(path)))
        await nursery.start(server.serve, [listener])
        running = Running(server, path)
        started.append(running)
        return running

    yield start_server
    for running in started:
        for wire in running.wires:
            await trio.aclose_forcefully(wire.stream)
