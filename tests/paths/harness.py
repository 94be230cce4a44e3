"""Owns the harness: a whole daemon in the test's own process, over parts that can be delayed and watched.

`open_daemon` opens a weight store, PoCL, an arena and a swap directory, starts the real actors and the RPC
server, and gives a client of its socket. What differs from `mzd serve` is what a test injects.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import trio

from mzd.daemon import assembly, main, wiring
from mzd.daemon.config import Config, PressureConfig, ThreadsConfig
from mzd.daemon.device_choice import ChosenDevice
from mzd.daemon.status import StatusReporter
from mzd.daemon.text import read_text
from mzd.daemon.unit_memory import open_unit_memory
from mzd.device.engine import Engine
from mzd.device.opencl import OpenClDevice
from mzd.memory.arena import Arena
from mzd.memory.backend import MemoryBackend
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.process_memory import read_process_memory
from mzd.memory.workers import Workers
from mzd.model.weight_store import WeightStore
from mzd.native import crc32c
from mzd.policy.pressure import MemoryRoom
from mzd.policy.profile import DEFAULT_PROFILE
from mzd.rpc.client import RpcClient, open_rpc_client
from mzd.rpc.endpoint import bind_socket
from mzd.rpc.server import RpcServer
from tests.paths.faults import PoisonedPages, poisoned
from tests.paths.invariants import check_books

CONFIG = Config(codec="none", activations="f32", huge_pages=False, pressure=PressureConfig(enabled=False))
"""Exact, and with pages that come and go one by one."""

RESERVATION_BYTES = 32 << 20

BLOCKED_S = 60.0
"""An operation that takes longer is stuck: it takes milliseconds, on a loaded machine perhaps seconds."""

MakeMemory = Callable[[Callable[[int], Any]], MemoryBackend]
MakeWorkers = Callable[[ThreadsConfig], dict[str, Workers]]


class WatchedEngine(Engine):
    """Keeps a copy of every row of logits that a sampler got to see."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[np.ndarray] = []

    def logits(self) -> np.ndarray:
        rows = super().logits()
        self.seen.append(rows.copy())
        return rows


class SlowWorkers(Workers):
    """Threads that begin and end late, each time by another random time."""

    def __init__(self, name: str, threads: int, rng: random.Random, delay_s: float) -> None:
        super().__init__(name, threads)
        self._rng = rng
        self._delay_s = delay_s

    def _pinned_call(self, work: Callable[..., Any], *args: Any) -> Any:
        before_s, after_s = (self._rng.choice((0.0, self._rng.random() * self._delay_s)) for _ in range(2))
        time.sleep(before_s)
        try:
            return super()._pinned_call(work, *args)
        finally:
            time.sleep(after_s)


def slow_workers(seed: int, delay_s: float) -> MakeWorkers:
    """`worker_groups`, with delays up to `delay_s` before and after every piece of work."""

    def make(threads: ThreadsConfig) -> dict[str, Workers]:
        rng = random.Random(seed)
        return {
            kind: SlowWorkers(kind, group.threads, rng, delay_s)
            for kind, group in wiring_worker_groups(threads).items()
        }

    return make


wiring_worker_groups = wiring.worker_groups


def poisoned_arena(reserve: Callable[[int], Any]) -> Arena:
    """Every byte that is not a resident unit's is NaN."""
    return Arena(poisoned(reserve), RESERVATION_BYTES, huge_pages=False, pages=PoisonedPages())


@dataclass
class Daemon:
    """A daemon that runs, seen from its client and from inside."""

    opened: assembly.Opened
    system: wiring.System
    server: RpcServer
    reporter: StatusReporter
    client: RpcClient
    socket_path: str

    @property
    def units(self):
        return self.opened.parts.units

    @property
    def conversations(self):
        return self.reporter.conversations

    @property
    def arena(self) -> Arena:
        return self.opened.parts.memory

    @property
    def store_fd(self) -> int:
        """Of the weight store."""
        return self.opened.parts.store.fd

    @property
    def engine(self) -> WatchedEngine:
        return self.opened.parts.engine

    async def call(self, method: str, **params: Any) -> Any:
        """One call; stuck for `BLOCKED_S` seconds is a failure."""
        with trio.fail_after(BLOCKED_S):
            return await self.client.call(method, params)

    async def generate(self, context: str, tokens: list[int], max_tokens: int = 0, **params: Any) -> Any:
        """Continue a context greedily."""
        given = {"context": context, "tokens": tokens, "max_tokens": max_tokens, "temperature": 0.0}
        return await self.call("generate", **(given | params))

    async def evict(self, fraction: float = 1.0, **params: Any) -> Any:
        """Evict a share of the whole model memory, unless `bytes` says how much."""
        return await self.call("evict", **(params if "bytes" in params else {"fraction": fraction, **params}))

    async def settle(self) -> None:
        """Wait until every request has ended and the allocator has done its part; then check its books."""
        await self.call("status")  # the server has read whatever was sent before
        with trio.fail_after(BLOCKED_S):
            while self.server.statistics().running_requests:  # noqa: ASYNC110 - a cancelled one tells nobody
                await trio.sleep(0.001)
        await self.evict(bytes=0)
        check_books(self)

    def states(self, context: str) -> set[str]:
        """Names of the states that a context's chunks are in."""
        cache = self.units.caches[context]
        return {cache.state(place).name for place in np.ndindex(cache.states.shape)}

    def chunk_sums(self, context: str) -> dict[tuple[int, int], int]:
        """Checksums of the chunks in memory, by place."""
        size_bytes = self.units.kv_sizes.chunk_bytes
        leases = self.units.caches[context].leases
        return {place: crc32c(lease.address, size_bytes, 0) for place, lease in sorted(leases.items())}

    def weight_sums(self) -> list[int]:
        """Checksums of every weight layer and the head, all resident."""
        whole = [*self.units.weights, self.units.head]
        return [crc32c(unit.lease.address, unit.size_bytes, 0) for unit in whole]

    def swap_path(self, context: str) -> Path:
        """The file that holds a context's chunks."""
        return self.opened.contexts.path / context / "swap"

    def resident_set_bytes(self) -> int:
        """Of this process, from smaps_rollup."""
        return read_process_memory().rss_bytes


@contextlib.asynccontextmanager
async def open_daemon(
    device: OpenClDevice,
    store_path: Path,
    state: Path,
    config: Config = CONFIG,
    *,
    memory: MakeMemory | None = None,
    workers: MakeWorkers | None = None,
    available_bytes: Callable[[], int | None] | None = None,
    **changes: Any,
) -> AsyncIterator[Daemon]:
    """Run a daemon for the block; it ends as if killed: nothing is saved.

    Args:
        state: the state directory; give the same one again for a restart.
        memory: makes the memory of units from the device's `reserve_svm`; by default what suits the device.
        workers: makes the threads.
        available_bytes: what the system says it has left; by default nobody tells.
        changes: to `config`.
    """
    config = replace(config, **changes)
    with contextlib.ExitStack() as stack:
        opened = _open_parts(stack, device, store_path, state, config)
        if memory is not None:
            opened.parts.memory = memory(device.reserve_svm)
        opened.parts.room = partial(_room, available_bytes)
        with mock.patch.object(wiring, "worker_groups", workers or wiring_worker_groups):
            made = main._make_daemon(config, opened, DEFAULT_PROFILE)
        path = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='mzd-'))}/s"
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(_listening(path)))
        with alone():
            async with trio.open_nursery() as nursery:
                for run in made.system.runs:
                    nursery.start_soon(run)
                await nursery.start(made.server.serve, [listener])
                async with open_rpc_client(path) as client:
                    yield Daemon(opened, made.system, made.server, made.reporter, client, path)
                nursery.cancel_scope.cancel()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let an exception that is alone in its groups out as itself, so that a test can say which it expects."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaf: BaseException = group
        while isinstance(leaf, BaseExceptionGroup) and len(leaf.exceptions) == 1:
            leaf = leaf.exceptions[0]
        raise leaf from None


def _listening(path: str) -> Any:
    listener = bind_socket(Path(path))
    listener.setblocking(False)
    return listener


def _open_parts(
    stack: contextlib.ExitStack, device: OpenClDevice, store_path: Path, state: Path, config: Config
) -> assembly.Opened:
    store = stack.enter_context(WeightStore.open(store_path))
    engine = WatchedEngine(
        device,
        store.index,
        context_tokens_max=store.index.config.context_length,
        ubatch_tokens_max=wiring.UBATCH_TOKENS,
    )
    stack.callback(engine.close)
    contexts = ContextDirectory(state / "contexts")
    stack.callback(contexts.close)
    memory = open_unit_memory(device, stack, huge_pages=config.huge_pages, lock_memory=config.lock_memory)
    parts = assembly._parts(config, store, memory, engine, contexts)
    chosen, text = ChosenDevice(device, refusals=()), read_text(store.index.tokenizer)
    return assembly.Opened(parts, chosen, text, contexts, store.index.config.context_length, 0)


def _room(available_bytes: Callable[[], int | None] | None) -> MemoryRoom | None:
    available = available_bytes() if available_bytes else None
    return None if available is None else MemoryRoom(available, 0)
