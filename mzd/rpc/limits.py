"""Owns the bounds of the RPC layer, all configurable, with the reasons for their defaults."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, and all clients together, may make the daemon hold.

    Attributes:
        frame_bytes_max: one MessagePack object on the wire, either way.
        frame_items_max: values in one frame, keys included. A token list of the longest supported context
            (131072) fits twice; what msgpack builds from a frame stays near 60 bytes an item.
        frame_depth_max: arrays and maps inside each other. Requests need 6.
        connections_max: connections at a time; one more is told `busy` and closed.
        requests_per_connection_max: requests of one connection that run or wait; one more is told `busy`.
        buffered_bytes_max: unfinished frames of all connections together.
        outbox_frames_max: frames of one connection that wait to be written; then its requests wait.
        stall_s: a client that takes no byte for so long is closed.
        farewell_s: what a connection that the daemon ends gets to take its last answers.
        linger_s: part of it: how long the daemon, all said, waits for the client to close.
    """

    frame_bytes_max: int = 16 * MIB
    frame_items_max: int = 1 << 18
    frame_depth_max: int = 16
    connections_max: int = 256
    requests_per_connection_max: int = 256
    buffered_bytes_max: int = 64 * MIB
    outbox_frames_max: int = 8
    stall_s: float = 30.0
    farewell_s: float = 5.0
    linger_s: float = 1.0


# A client trusts its daemon more than the daemon its clients: traces are long.
CLIENT_LIMITS = Limits(frame_bytes_max=64 * MIB, frame_items_max=1 << 22, frame_depth_max=64)
