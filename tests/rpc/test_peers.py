"""Who may connect, by the kernel's word."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from mzd.errors import MzdError
from mzd.rpc.peers import PeerPolicy, group_id

SO_PEERGROUPS = 59


class Peer:
    """A socket whose other end is a given user."""

    def __init__(self, uid: int, gid: int, groups: tuple[int, ...] | None = ()) -> None:
        self.credentials = struct.pack("iII", 4242, uid, gid)
        self.groups = groups

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert level == socket.SOL_SOCKET
        if option == socket.SO_PEERCRED:
            return self.credentials[:size]
        assert option == SO_PEERGROUPS
        if self.groups is None:
            raise OSError("an old kernel")
        return struct.pack(f"{len(self.groups)}I", *self.groups)


@pytest.mark.parametrize("peer", [Peer(1000, 1000), Peer(0, 0), Peer(1001, 50), Peer(1001, 7, (8, 50, 9))])
def test_same_user_root_and_members_may_connect(peer):
    assert PeerPolicy(frozenset({0, 1000}), gid=50).check(peer) in (0, 1000, 1001)


@pytest.mark.parametrize("peer", [Peer(1001, 7, (8, 9)), Peer(1001, 7, None), Peer(0xFFFFFFFF, 0xFFFFFFFF)])
def test_strangers_may_not(peer):
    with pytest.raises(MzdError) as caught:
        PeerPolicy(frozenset({0, 1000}), gid=50).check(peer)
    assert caught.value.code == "invalid_request"


def test_without_a_group_membership_counts_for_nothing():
    with pytest.raises(MzdError):
        PeerPolicy(frozenset({1000})).check(Peer(1001, 0, (0,)))


def test_a_real_unix_socket_tells_this_process():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        assert PeerPolicy.same_user().check(ours) == os.geteuid()
        assert PeerPolicy(frozenset(), gid=os.getegid()).check(ours) == os.geteuid()
        for gid in os.getgroups():
            assert PeerPolicy(frozenset(), gid=gid).check(ours) == os.geteuid()


def test_a_socket_that_knows_no_peer_is_refused():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    with listener, client, accepted, pytest.raises(MzdError):
        PeerPolicy.same_user().check(accepted)


def test_a_group_that_does_not_exist_is_named():
    assert group_id("root") == 0
    with pytest.raises(MzdError, match="no-such-group"):
        PeerPolicy.same_user("no-such-group")
