"""A fake daemon: the real RpcServer in a thread, with handlers that a test can read and replace."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from mzd.errors import MzdError
from mzd.rpc.call import Call, Method
from mzd.rpc.endpoint import bind_socket
from mzd.rpc.params import SCHEMAS
from mzd.rpc.peers import PeerPolicy
from mzd.rpc.server import RpcServer

STATUS = {
    "version": "1.2.3",
    "state": "idle",
    "ready_s": 1.25,
    "model": {
        "name": "smollm2", "architecture": "llama", "num_layers": 30, "context_length": 8192,
        "file": "x.gguf",
    },
    "device": {
        "name": "pocl", "driver": "3.1", "memory_backend": "arena", "kernels": "f32 activations",
        "refused": [
            {"device": "Mali", "memory": "staged", "kernels": "gpu", "kernel": "embed", "reason": "no"},
        ],
    },
    "memory": {
        "weights_bytes": 98_000_000, "kv_bytes": 5_000_000, "head_bytes": 1, "compressed_bytes": 0,
        "staging_bytes": 0, "scratch_bytes": 0, "baseline_bytes": 40_000_000, "total_bytes": 143_000_001,
        "kernel_bytes": 143_000_001, "evictable_bytes": 103_000_001, "full_bytes": 103_000_001,
    },
    "storage": {"store_bytes": 98_000_000, "swap_bytes": 0, "quota_bytes": 0, "written_bytes": 7},
    "pressure": {
        "source": "psi+available", "level": "none", "available_bytes": None, "floor_bytes": 1_000_000,
        "last_decision": {"evict_bytes": 5, "reason": "below the floor"},
    },
    "profile": {"read_bytes_s": 5e8},
    "contexts": [
        {
            "context": "a[bold]b", "tokens": 300, "resident_bytes": 5_000_000, "compressed_bytes": 0,
            "stored_bytes": 0, "last_used_s": 7300.0, "pinned": True, "state": "ok",
        },
        {
            "context": "old", "tokens": 9, "resident_bytes": 0, "compressed_bytes": 0,
            "stored_bytes": 0, "last_used_s": None, "pinned": False, "state": "stale",
        },
    ],
}  # fmt: skip
EVICTED = {
    "requested_bytes": 5_000_000, "freed_bytes": 4_000_000, "resident_bytes": 99_000_000, "exhausted": True,
    "warnings": ["swap_full"],
    "steps": [
        {"stage": "KVonly", "unit": "kv", "layer": 3, "chunk": 1, "context": "c", "to": "ram",
         "bytes": 750_000},
        {"stage": "KVonly", "unit": "kv", "layer": 2, "chunk": 1, "context": "c", "to": "ram",
         "bytes": 750_000},
        {"stage": "Wonly", "unit": "weights", "layer": 29, "to": "dropped", "bytes": 2_500_000},
        {"stage": "head", "unit": "head", "layer": None, "to": "dropped", "bytes": 1},
    ],
}  # fmt: skip
EVENTS = [
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "read"}},
    {"ph": "X", "name": "layer 0", "pid": 1, "tid": 1, "ts": 1000.0, "dur": 500.0},
    {"ph": "X", "name": "layer 0", "pid": 1, "tid": "prefill", "ts": 1500.0, "dur": 250.0},
    {"ph": "X", "name": "layer 1", "pid": 1, "tid": 1, "ts": 1500.0, "dur": 500.0},
]


STUCK_S = 60.0
"""What takes longer will not end."""


@dataclass
class FakeDaemon:
    """What was asked, and how it is answered."""

    path: Path
    asked: list[tuple[str, Any]] = field(default_factory=list)
    failure: MzdError | None = None
    words: tuple[str, ...] = ("Hello", ", ", "world")
    interrupt: bool = False
    cancelled: list[str] = field(default_factory=list)
    reused_tokens: int = 5
    recomputed_tokens: int = 0
    usual_handler: Any = field(default_factory=lambda: signal.getsignal(signal.SIGINT))

    async def generate(self, params: Any, call: Call) -> dict[str, Any]:
        if params.stream:
            await call.notify("progress", {"phase": "restoring", "done": 1, "total": 2})
            await call.notify("progress", {"phase": "restoring", "done": 2, "total": 2})
        for number, word in enumerate(self.words):
            call.partial_text += word
            if params.stream:
                await call.notify("token", {"text": word, "token": number})
        if self.interrupt:
            self.interrupt = False
            await self._until_cancelled(call)
        text = call.partial_text + (" and more" if params.stream else "")
        usage = {
            "prompt_tokens": 9,
            "reused_tokens": self.reused_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }
        return {"context": params.context or "c1", "text": text, "finish_reason": "stop", "usage": usage}

    async def _until_cancelled(self, call: Call) -> None:
        """Press Ctrl-C, once the client listens to it: it answers after all text that was sent before."""
        try:
            while signal.getsignal(signal.SIGINT) is self.usual_handler:  # noqa: ASYNC110 - it is no event
                await trio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep(STUCK_S)
        finally:
            self.cancelled.append(call.request)

    def methods(self) -> dict[str, Method[Any]]:
        results = {
            "status": STATUS, "contexts": {"contexts": STATUS["contexts"]}, "metrics": {"text": "mzd_up 1\n"},
            "evict": EVICTED, "trim": EVICTED, "drop": {"dropped": True}, "pin": {"pinned": True},
            "restore": {"restored_bytes": 5_000_000, "resident_bytes": 6_000_000},
            "trace": {"events": EVENTS},
        }  # fmt: skip
        methods = {
            name: Method(SCHEMAS[name], self._recorded(name, result)) for name, result in results.items()
        }
        methods["generate"] = Method(SCHEMAS["generate"], self._recorded("generate", self.generate))
        return methods

    def _recorded(self, name: str, answer: Any) -> Callable[[Any, Call], Awaitable[Any]]:
        async def handler(params: Any, call: Call) -> Any:
            self.asked.append((name, params))
            if self.failure is not None:
                raise self.failure
            return await answer(params, call) if callable(answer) else answer

        return handler


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """A fake daemon at $MZD_SOCKET."""
    fake = FakeDaemon(tmp_path / "mzd.sock")
    server = RpcServer(fake.methods(), allowed=PeerPolicy.same_user())
    ready = threading.Event()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bind_socket(fake.path)))
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, [listener])
            ready.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    assert ready.wait(STUCK_S)
    monkeypatch.setenv("MZD_SOCKET", str(fake.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield fake
    tokens[0].run_sync_soon(server.stop)
    thread.join(STUCK_S)
    assert not thread.is_alive()
