"""Owns the socket's place: where clients look for it, and how the daemon makes it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from mzd.errors import MzdError

SYSTEM_SOCKET = "/run/mzd/mzd.sock"
_BACKLOG = 128


class NoDaemonError(MzdError):
    """Nobody answers at the socket, or whoever did went away; code `no_daemon`, made by clients only."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__("no_daemon", f"no daemon at {path}: {reason}", socket=path)


def default_socket_path(environment: Mapping[str, str] | None = None) -> str:
    """`$MZD_SOCKET`, else `$XDG_RUNTIME_DIR/mzd.sock`, else `/run/mzd/mzd.sock`."""
    environment = os.environ if environment is None else environment
    if path := environment.get("MZD_SOCKET"):
        return path
    if directory := environment.get("XDG_RUNTIME_DIR"):
        return os.path.join(directory, "mzd.sock")
    return SYSTEM_SOCKET


def connect_socket(path: str) -> socket.socket:
    """Connect a blocking stream socket.

    Raises:
        NoDaemonError: nothing listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise NoDaemonError(path, error.strerror or str(error)) from error
    return connection


def bind_socket(path: Path, *, gid: int | None = None) -> socket.socket:
    """Make the daemon's listening socket: 0600, or 0660 with its group; its directory is made 0700.

    A socket that a dead daemon left is replaced; anything else in its place is not touched.

    Raises:
        MzdError: `busy` when a daemon listens there, `invalid_params` when no socket can be made there.
    """
    free_socket_path(path)
    with _named_errors(path):
        return _bind(path, gid)


def free_socket_path(path: Path) -> None:
    """Make the directory of a socket, and remove the socket that a dead daemon left.

    Raises:
        MzdError: `busy` when a daemon listens there, `invalid_params` when no socket can be made there.
    """
    with _named_errors(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_dead_socket(path)


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"no socket can be made at {path}: {error.strerror or error}"
        raise MzdError("invalid_params", message, socket=str(path)) from error


def _remove_dead_socket(path: Path) -> None:
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        answer = probe.connect_ex(str(path))
    if answer == errno.ECONNREFUSED:
        path.unlink()
    elif answer in (0, errno.EAGAIN):
        raise MzdError("busy", f"a daemon listens at {path} already", socket=str(path))


def _bind(path: Path, gid: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Before bind(): Linux makes the file with the socket's own mode, so it is never open to others.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        if gid is not None:
            os.chown(path, -1, gid, follow_symlinks=False)
            path.chmod(0o660)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
