"""Owns waiting for memory stall: kernel triggers, systemd's protocol, and polling where both are refused."""

from __future__ import annotations

import base64
import binascii
import errno
import logging
import os
import select
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Protocol

import trio

from mzd.memory.pressure_sources import WATCH_VARIABLE, ProbeError, parse_psi, psi_path, read_probe
from mzd.policy.pressure import TRIGGER_STALL_US, TRIGGER_WINDOW_US

logger = logging.getLogger(__name__)

WRITE_VARIABLE: Final = "MEMORY_PRESSURE_WRITE"
DEFAULT_TRIGGER: Final = f"some {TRIGGER_STALL_US} {TRIGGER_WINDOW_US}\0".encode()

_DRAIN_BYTES: Final = 4096
_OPEN_FLAGS: Final = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC

WriteTrigger = Callable[[int, bytes], int]


class TriggerGoneError(Exception):
    """The source of the events is gone (its control group was removed, the peer hung up)."""


class PressureTrigger(Protocol):
    """Something that tells of stall."""

    @property
    def source(self) -> str:
        """What is watched, and how."""

    async def wait(self) -> None:
        """Return at the next event.

        Raises:
            TriggerGoneError: there will be none.

        Cancelled: an event that comes meanwhile is told of by the next call.
        """

    def close(self) -> None:
        """Stop watching. Twice is as good as once."""


class KernelTrigger:
    """A PSI file that was given a trigger.

    The file itself always counts as readable, so it is nested: an inner epoll waits for its POLLPRI, and
    becomes readable to trio's. Looking at the event takes it; so the wake-up is the event. The file is
    never read here, for a read would take the place of the trigger.
    """

    def __init__(self, fd: int, path: Path) -> None:
        """Takes over `fd`.

        Raises:
            OSError: the file cannot be polled. `fd` is closed then.
        """
        self.source = f"trigger on {path}"
        self._fd = fd
        self._inner = select.epoll()
        try:
            self._inner.register(fd, select.EPOLLPRI)
        except OSError:
            self.close()
            raise

    async def wait(self) -> None:
        """See `PressureTrigger`."""
        await trio.lowlevel.wait_readable(self._inner.fileno())
        if any(events & select.EPOLLERR for _, events in self._inner.poll(0)):
            raise TriggerGoneError(self.source)

    def close(self) -> None:
        """See `PressureTrigger`."""
        if not self._inner.closed:
            self._inner.close()
            os.close(self._fd)


class StreamTrigger:
    """A FIFO or a socket that a service manager writes to: bytes are events, and mean nothing else."""

    def __init__(self, fd: int, path: Path) -> None:
        """Takes over `fd`, which does not block."""
        self.source = f"stream {path}"
        self._fd = fd

    async def wait(self) -> None:
        """See `PressureTrigger`."""
        await trio.lowlevel.wait_readable(self._fd)
        try:
            drained = os.read(self._fd, _DRAIN_BYTES)
        except BlockingIOError:
            return
        if not drained:
            raise TriggerGoneError(self.source)

    def close(self) -> None:
        """See `PressureTrigger`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PollingTrigger:
    """The totals of a PSI file, read once a window: what a trigger would see, up to a window later."""

    def __init__(self, path: Path) -> None:
        """Read the total once.

        Raises:
            ProbeError: the file cannot be read.
        """
        self.source = f"polling {path}"
        self._path = path
        self._total_us = self._read_total_us()

    def _read_total_us(self) -> int:
        return parse_psi(read_probe(self._path)).some_total_us

    async def wait(self) -> None:
        """See `PressureTrigger`."""
        while True:
            await trio.sleep(TRIGGER_WINDOW_US / 1e6)
            before_us = self._total_us
            try:
                self._total_us = self._read_total_us()
            except ProbeError as error:
                raise TriggerGoneError(str(error)) from error
            if self._total_us - before_us >= TRIGGER_STALL_US:
                return

    def close(self) -> None:
        """Nothing is held."""


def open_triggers(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, *, write: WriteTrigger = os.write
) -> tuple[PressureTrigger, ...]:
    """Open what there is: the service's own control group as systemd names it, and the whole system.

    An idle service does not stall, so its own group alone would stay silent. Nothing is opened if the
    administrator turned watching off. What is missing or refused is left out, with a line in the log.
    """
    if environ.get(WATCH_VARIABLE) == "/dev/null":
        return ()
    own = _open_named(environ, write)
    return tuple(trigger for trigger in (own, _open_system(psi_path(root), write)) if trigger is not None)


def close_all(triggers: Iterable[PressureTrigger]) -> None:
    """Close every trigger."""
    for trigger in triggers:
        trigger.close()


def _open_named(environ: Mapping[str, str], write: WriteTrigger) -> PressureTrigger | None:
    """The trigger of `$MEMORY_PRESSURE_WATCH` (systemd.io/PRESSURE); its bytes are used as they are."""
    name = environ.get(WATCH_VARIABLE)
    if not name:
        return None
    path = Path(name)
    try:
        payload = base64.b64decode(environ.get(WRITE_VARIABLE, ""), validate=True)
        return _open_by_kind(path, payload, write)
    except (OSError, binascii.Error) as error:
        logger.warning("pressure watch refused: source=%s reason=%s", path, error)
        return None


def _open_by_kind(path: Path, payload: bytes, write: WriteTrigger) -> PressureTrigger:
    mode = path.stat().st_mode
    fd = _connect(path) if stat.S_ISSOCK(mode) else os.open(path, _OPEN_FLAGS)
    try:
        if payload:
            write(fd, payload)
    except OSError:
        os.close(fd)
        raise
    return KernelTrigger(fd, path) if stat.S_ISREG(mode) else StreamTrigger(fd, path)


def _connect(path: Path) -> int:
    """A connected, non-blocking stream socket's descriptor."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.connect(str(path))
        connection.setblocking(False)
    except OSError:
        connection.close()
        raise
    return connection.detach()


def _open_system(path: Path, write: WriteTrigger) -> PressureTrigger | None:
    """The system's stall: a kernel trigger, else polling, else nothing."""
    try:
        return _open_by_kind(path, DEFAULT_TRIGGER, write)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP):
            return None  # the kernel does not account stall; whoever reads it says so, once
        reason = error.strerror
    try:
        trigger = PollingTrigger(path)
    except ProbeError as error:
        logger.warning("pressure watch refused: source=%s reason=%s", path, error)
        return None
    logger.info("pressure trigger refused, polling instead: source=%s reason=%s", path, reason)
    return trigger
