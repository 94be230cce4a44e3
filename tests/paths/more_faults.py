"""Owns more bad luck: cancelled at a chosen message, memory refused, content rotten, records not written."""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import trio

from mzd import _native, native
from mzd.errors import MzdError
from mzd.memory import swap_journal
from mzd.memory.arena import Arena
from mzd.memory.in_memory_swap import InMemorySwap
from mzd.memory.token_log import TokenLog
from mzd.messages.reply import Reply

# Something at a chosen message.


class Messages:
    """Counts the moments around messages between actors: before a send, after a receipt, after an answer."""

    def __init__(self) -> None:
        self.count = 0
        self._acts: Mapping[int, Callable[[], Any]] = {}

    @contextlib.contextmanager
    def acting(self, acts: Mapping[int, Callable[[], Any]]) -> Iterator[None]:
        """Call each of `acts` at its moment from now on; the counter starts at 0."""
        self.count, self._acts = 0, acts
        try:
            yield
        finally:
            self._acts = {}

    def note(self) -> None:
        """One moment has come."""
        act = self._acts.get(self.count)
        self.count += 1
        if act is not None:
            act()


@contextlib.contextmanager
def watched_messages() -> Iterator[Messages]:
    """Every channel and every reply of the daemons opened in the block is counted."""
    messages = Messages()
    real_send, real_receive = trio.MemorySendChannel.send, trio.MemoryReceiveChannel.receive
    real_settle = Reply._settle

    async def send(channel: Any, value: Any) -> None:
        if _is_message(value):
            messages.note()
        await real_send(channel, value)

    async def receive(channel: Any) -> Any:
        value = await real_receive(channel)
        if _is_message(value):
            messages.note()
        return value

    def settle(reply: Reply[Any]) -> None:
        real_settle(reply)
        messages.note()

    with (
        mock.patch.object(trio.MemorySendChannel, "send", send),
        mock.patch.object(trio.MemoryReceiveChannel, "receive", receive),
        mock.patch.object(Reply, "_settle", settle),
    ):
        yield messages


def _is_message(value: Any) -> bool:
    """What the RPC server passes between its own tasks does not count."""
    return type(value).__module__.startswith("mzd.messages.")


async def outcome_of(request: Awaitable[Any]) -> str:
    """The code of the error that a request ends with, or `done`."""
    try:
        await request
    except MzdError as error:
        return error.code
    return "done"


def cancel_requests(daemon: Any, *names: str) -> None:
    """What the RPC method `cancel` does, at once: for these requests, or for every one that runs."""
    calls = daemon.server._calls
    for name in names or list(calls._by_name):
        calls.cancel(name)


# Memory that is refused.


class Refusals:
    """Once armed, lets some calls through, refuses some, and lets the others through."""

    def __init__(self) -> None:
        self._refused = range(0)
        self._numbers, self._lock = count(), threading.Lock()

    def arm(self, after: int = 0, times: int = 1 << 30) -> None:
        """Refuse `times` calls, once `after` more have passed."""
        self._numbers, self._refused = count(), range(after, after + times)

    def disarm(self) -> None:
        """Refuse nothing any more."""
        self._refused = range(0)

    def __call__(self) -> bool:
        """Whether to refuse this call."""
        with self._lock:
            return next(self._numbers) in self._refused


class RefusingPages:
    """The kernel's pages, of which some are not to be had."""

    def __init__(self, refuse: Refusals) -> None:
        self._refuse = refuse

    def populate(self, address: int, size_bytes: int, huge: bool, /) -> int:
        return -errno.ENOMEM if self._refuse() else native.populate(address, size_bytes, huge)

    def release(self, address: int, size_bytes: int, /) -> int:
        return native.release(address, size_bytes)

    def lock(self, address: int, size_bytes: int, /) -> int:
        return native.lock(address, size_bytes)

    def unlock(self, address: int, size_bytes: int, /) -> int:
        return native.unlock(address, size_bytes)


def arena_without_pages(refuse: Refusals) -> Callable[[Callable[[int], Any]], Arena]:
    """An arena that cannot populate when `refuse` says so."""

    def make(reserve: Callable[[int], Any]) -> Arena:
        return Arena(reserve, 32 << 20, huge_pages=False, pages=RefusingPages(refuse))

    return make


def arena_without_room(refuse: Refusals) -> Callable[[Callable[[int], Any]], Arena]:
    """An arena whose units are refused when `refuse` says so."""

    class FullArena(Arena):
        def reserve_run(self, sizes: Any) -> Any:
            if refuse():
                raise MzdError("insufficient_memory", "planted: no address space")
            return super().reserve_run(sizes)

    def make(reserve: Callable[[int], Any]) -> Arena:
        return FullArena(reserve, 32 << 20, huge_pages=False)

    return make


@contextlib.contextmanager
def refused_payloads(refuse: Refusals) -> Iterator[None]:
    """The in-memory swap gets no memory when `refuse` says so."""
    push = InMemorySwap.push

    def push_or_refuse(swap: InMemorySwap, size_bytes: int, *, huge: bool = False) -> Any:
        if refuse():
            raise MzdError("insufficient_memory", "planted: no segment")
        return push(swap, size_bytes)

    with mock.patch.object(InMemorySwap, "push", push_or_refuse):
        yield


@contextlib.contextmanager
def refused_maps(module: ModuleType) -> Iterator[None]:
    """`mmap.mmap` fails as it does without memory, for one module."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    flags = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS")}
    with mock.patch.object(module, "mmap", SimpleNamespace(mmap=refuse, **flags)):
        yield


# Flash that fails.


@contextlib.contextmanager
def io_fault(kind: str, every_nth: int) -> Iterator[None]:
    """Every nth system call of the C extension's reads and writes: `short`, `eintr`, `eio` or `enospc`."""
    _native._set_io_fault(every_nth, kind)
    try:
        yield
    finally:
        _native._set_io_fault(0, "none")


@contextlib.contextmanager
def rotten_extent(number: int, wanted: Callable[[int], bool]) -> Iterator[None]:
    """One bit of the extent of that number is another one when it is read; only `wanted` files count."""
    real, lock, numbers = native.read_extents, threading.Lock(), count()

    def read(fd: int, offsets: Any, addresses: Any, sizes: Any, *rest: Any) -> Any:
        results = real(fd, offsets, addresses, sizes, *rest)
        for address in addresses if wanted(fd) else ():
            with lock:
                hit = next(numbers) == number
            if hit:
                _flip(int(address) + 64)
        return results

    with mock.patch.object(native, "read_extents", read):
        yield


def _flip(address: int) -> None:
    byte = np.empty(1, np.uint8)
    native.copy(byte.ctypes.data, address, 1)
    native.fill(address, 1, int(byte[0]) ^ 0x10)


@contextlib.contextmanager
def failing_journal(error: int, refuse: Refusals) -> Iterator[None]:
    """Records of the swap are written by half, and then not at all, when `refuse` says so."""
    real = swap_journal.write_all

    def write(fd: int, content: bytes, offset_bytes: int) -> None:
        if refuse():
            real(fd, content[: len(content) // 2], offset_bytes)
            raise OSError(error, "planted")
        real(fd, content, offset_bytes)

    with mock.patch.object(swap_journal, "write_all", write):
        yield


@contextlib.contextmanager
def failing_token_logs() -> Iterator[None]:
    """No room to log a token."""

    def refuse(log: TokenLog, tokens: Any) -> None:
        raise MzdError("swap_full", "planted: no space for tokens")

    with mock.patch.object(TokenLog, "append", refuse):
        yield
