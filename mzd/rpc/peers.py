"""Owns who may speak to the daemon: the kernel's word on the peer of a Unix socket."""

from __future__ import annotations

import grp
import os
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from mzd.errors import MzdError

_UCRED = struct.Struct("iII")  # pid, uid, gid
_SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13; Python has no name for it
_GROUPS_MAX = 65536  # NGROUPS_MAX


class SocketOptions(Protocol):
    """A socket of the standard library or of Trio."""

    def getsockopt(self, level: int, option: int, buffer_bytes: int, /) -> bytes:
        """As socket.getsockopt."""
        ...


@dataclass(frozen=True, slots=True)
class PeerPolicy:
    """The same user, root, or a member of one group.

    Attributes:
        uids: users that may connect.
        gid: the group whose members may connect too, or None.
    """

    uids: frozenset[int]
    gid: int | None = None

    @classmethod
    def same_user(cls, group: str = "") -> PeerPolicy:
        """This process's user and root; with `group`, its members as well.

        Raises:
            MzdError: `invalid_params` when there is no such group.
        """
        return cls(frozenset({0, os.geteuid()}), group_id(group) if group else None)

    def check(self, peer: SocketOptions) -> int:
        """Return the peer's user id.

        Raises:
            MzdError: `invalid_request` for a stranger, or a socket that does not tell who its peer is.
        """
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, gid = _UCRED.unpack(credentials)
        if uid in self.uids or (self.gid is not None and self.gid in {gid, *_peer_groups(peer)}):
            return int(uid)
        raise MzdError("invalid_request", f"user {uid} may not use this socket", uid=uid)


def _peer_groups(peer: SocketOptions) -> tuple[int, ...]:
    """Supplementary groups as they were at connect(); () where the kernel does not tell."""
    try:
        packed = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
    except OSError:
        return ()
    return struct.unpack(f"{len(packed) // 4}I", packed)


def group_id(name: str) -> int:
    """The number of a group.

    Raises:
        MzdError: `invalid_params`.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise MzdError("invalid_params", f"there is no group {name}", socket_group=name) from None
