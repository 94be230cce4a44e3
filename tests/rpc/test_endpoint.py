"""The socket's place: who wins, what mode it has, what is left alone."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from mzd.errors import MzdError
from mzd.rpc.endpoint import NoDaemonError, bind_socket, connect_socket, default_socket_path


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"MZD_SOCKET": "/a/b", "XDG_RUNTIME_DIR": "/run/user/1"}, "/a/b"),
        ({"MZD_SOCKET": "", "XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/mzd.sock"),
        ({}, "/run/mzd/mzd.sock"),
    ],
)
def test_where_clients_look(environment, path):
    assert default_socket_path(environment) == path


@pytest.fixture
def loose_umask():
    old = os.umask(0)
    yield
    os.umask(old)


def test_only_the_owner_may_use_a_new_socket(tmp_path, loose_umask):
    path = tmp_path / "new" / "mzd.sock"
    with bind_socket(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        connect_socket(str(path)).close()


def test_a_group_may_use_it_where_one_is_named(tmp_path, loose_umask):
    path = tmp_path / "mzd.sock"
    with bind_socket(path, gid=os.getegid()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert path.stat().st_gid == os.getegid()


def test_a_dead_daemons_socket_is_replaced_and_a_live_ones_is_not(tmp_path):
    path = tmp_path / "mzd.sock"
    bind_socket(path).close()
    with bind_socket(path):
        with pytest.raises(MzdError) as caught:
            bind_socket(path)
        assert caught.value.code == "busy"
        connect_socket(str(path)).close()


def test_what_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "mzd.sock"
    path.write_text("precious")
    with pytest.raises(MzdError) as caught:
        bind_socket(path)
    assert caught.value.code == "invalid_params"
    assert path.read_text() == "precious"


def test_a_path_too_long_for_a_socket_is_told(tmp_path):
    with pytest.raises(MzdError, match="no socket can be made"):
        bind_socket(tmp_path / ("x" * 120))


@pytest.mark.parametrize("what", ["nothing", "dead", "file", "too long"])
def test_no_daemon_is_an_error_of_its_own(tmp_path, what):
    path = tmp_path / ("x" * 120 if what == "too long" else "mzd.sock")
    if what == "dead":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.close()
    elif what == "file":
        path.write_text("")
    with pytest.raises(NoDaemonError) as caught:
        connect_socket(str(path))
    assert caught.value.code == "no_daemon"
    assert caught.value.data == {"socket": str(path)}
