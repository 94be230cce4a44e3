"""The service manager, played by the test: its messages, its watchdog, the sockets it hands over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import trio
import trio.testing

from mzd.daemon.notify import ServiceManager, handed_over_sockets

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


@pytest.fixture(autouse=True)
def _no_manager(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["path", "abstract"])
def manager_address(request, tmp_path):
    """A name as systemd gives it: `@` stands for the abstract namespace."""
    return str(tmp_path / "notify") if request.param == "path" else f"@mzd-{os.getpid()}-{tmp_path.name}"


@pytest.fixture
def manager_socket(manager_address, monkeypatch):
    """What systemd binds, named in the environment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(manager_address.replace("@", "\0", 1))
        bound.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", manager_address)
        yield bound


def said(manager_socket):
    messages = []
    while True:
        try:
            messages.append(manager_socket.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_lines_arrive_as_one_message_each(manager_socket):
    manager = ServiceManager()
    manager.tell("READY=1", "STATUS=ready")
    manager.tell("STOPPING=1")
    assert said(manager_socket) == ["READY=1\nSTATUS=ready", "STOPPING=1"]


def test_children_do_not_inherit_the_address(manager_socket):
    ServiceManager().tell("READY=1")
    assert "NOTIFY_SOCKET" not in os.environ
    ServiceManager().tell("READY=1")  # a second one has nobody to talk to
    assert said(manager_socket) == ["READY=1"]


def test_a_manager_that_is_gone_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    ServiceManager().tell("READY=1")


# Watchdog


async def watched(seconds):
    """What the manager hears in so many virtual seconds."""
    manager = ServiceManager()
    with trio.move_on_after(seconds):
        await manager.run_watchdog()


async def test_the_watchdog_is_fed_at_half_its_interval(manager_socket, monkeypatch, autojump_clock):
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    await watched(59)
    assert said(manager_socket) == ["WATCHDOG=1"] * 4  # at 0, 15, 30 and 45 s


@pytest.mark.parametrize("interval", ["", "0", "soon", "-5"])
async def test_without_an_interval_the_watchdog_ends_at_once(
    manager_socket, monkeypatch, autojump_clock, interval
):
    monkeypatch.setenv("WATCHDOG_USEC", interval)
    await watched(3600)
    assert trio.current_time() < 1
    assert said(manager_socket) == []


@pytest.mark.parametrize(("offset", "beats"), [(1, 0), (0, 2)])
async def test_only_the_watched_process_beats(manager_socket, monkeypatch, autojump_clock, offset, beats):
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + offset))
    await watched(0.9)
    assert len(said(manager_socket)) == beats


# Sockets handed over. They start at descriptor 3, which a test's own process needs: so in a child.

CHILD = """
import fcntl, os, sys
from mzd.daemon.notify import handed_over_sockets
pid, count, *given = sys.argv[1:]
aside = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in given]
for target, fd in enumerate(aside, start=3):
    os.dup2(fd, target)
os.environ["LISTEN_PID"] = pid.format(os.getpid())
os.environ["LISTEN_FDS"] = count
sockets = list(handed_over_sockets())
left = [name for name in os.environ if name.startswith("LISTEN_")]
print([os.path.basename(s.getsockname()) for s in sockets], [s.get_inheritable() for s in sockets], left)
"""


def hand_over(tmp_path, pid, count):
    """Give a child two listening sockets at 3 and 4, as systemd does; what it made of them."""
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        for listener, name in ((first, "a.sock"), (second, "b.sock")):
            listener.bind(str(tmp_path / name))
            listener.listen()
        given = (first.fileno(), second.fileno())
        command = [sys.executable, "-c", CHILD, pid, count, *map(str, given)]
        done = subprocess.run(command, pass_fds=given, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("pid", "count", "taken"),
    [
        ("{}", "2", "['a.sock', 'b.sock'] [False, False] []"),
        ("{}", "1", "['a.sock'] [False] []"),
        ("{}", "0", "[] [] []"),
        ("{}", "two", "[] [] []"),
        ("1", "2", "[] [] []"),
        ("", "2", "[] [] []"),
    ],
)
def test_only_sockets_meant_for_this_process_are_taken(tmp_path, pid, count, taken):
    assert hand_over(tmp_path, pid, count) == taken


def test_nothing_is_handed_over_without_a_manager():
    assert list(handed_over_sockets()) == []
