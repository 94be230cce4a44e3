"""Owns the conversation with the service manager: readiness, status, watchdog, handed-over sockets.

Source: systemd's sd_notify(3) and sd_listen_fds(3). Without a manager every call does nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import trio

FIRST_LISTEN_FD = 3


class ServiceManager:
    """The manager named by the environment at start; the variables are taken out for child processes."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        self._watchdog_us = _watchdog_interval_us()

    def tell(self, *lines: str) -> None:
        """Send lines such as ``READY=1``; a manager that is gone is no reason to fail."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            try:
                channel.sendto("\n".join(lines).encode(), address)
            except OSError:
                return

    async def run_watchdog(self) -> None:
        """Say ``WATCHDOG=1`` at half of the asked interval, from the loop: a stuck loop is noticed."""
        if not self._watchdog_us:
            return
        while True:
            self.tell("WATCHDOG=1")
            await trio.sleep(self._watchdog_us / 2e6)


def _watchdog_interval_us() -> int:
    pid = os.environ.pop("WATCHDOG_PID", str(os.getpid()))
    interval = os.environ.pop("WATCHDOG_USEC", "0")
    if pid != str(os.getpid()):
        return 0
    return int(interval) if interval.isdigit() else 0


def handed_over_sockets() -> Iterator[socket.socket]:
    """The listening sockets of socket activation; none when they are meant for another process."""
    count = os.environ.pop("LISTEN_FDS", "0")
    pid = os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return
    for fd in range(FIRST_LISTEN_FD, FIRST_LISTEN_FD + int(count)):
        os.set_inheritable(fd, False)
        yield socket.socket(fileno=fd)
