"""Owns MessagePack frames: where one ends in a stream of bytes, and that none is built before it is bounded.

`msgpack` allocates what a header announces (five bytes can ask for a list of 4 billion), so a scanner walks
the headers first and counts; only a whole frame within all limits is given to it.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from mzd.errors import MzdError
from mzd.rpc.limits import Limits


class ProtocolError(MzdError):
    """The stream cannot be read on: `invalid_request` or `frame_too_large`. Ends the connection."""


def _fixed_sizes() -> tuple[int, ...]:
    """(256,) bytes of the item that starts with this byte, children left out; 0: a length field follows."""
    sizes = [1] * 256
    sizes[0xA0:0xC0] = [1 + length for length in range(32)]  # fixstr
    sizes[0xC1] = 0  # never used, by the specification
    sizes[0xC4:0xCA] = [0] * 6  # bin, ext
    sizes[0xCA:0xD4] = [5, 9, 2, 3, 5, 9, 2, 3, 5, 9]  # float, uint, int
    sizes[0xD4:0xD9] = [3, 4, 6, 10, 18]  # fixext
    sizes[0xD9:0xE0] = [0] * 7  # str, array, map
    return tuple(sizes)


# Scalars by first byte; 0 for containers too, so that one look-up tells the common case.
_SCALAR_BYTES: Final = tuple(0 if 0x80 <= byte < 0xA0 else size for byte, size in enumerate(_fixed_sizes()))
# First byte: (bytes of the length field, bytes between it and the payload).
_BLOBS: Final = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
# First byte: (bytes of the count, items per entry).
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


class FrameReader:
    """Cuts one connection's bytes into frames. Pure: feed bytes, take frames.

    Holds at most `frame_bytes_max` and one feed. Each header is read once, whatever the sizes of the feeds.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._restart()

    @property
    def buffered_bytes(self) -> int:
        """Bytes held that belong to no finished frame yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Append what was received."""
        self._buffer += data

    def next_frame(self) -> bytearray | None:
        """The next whole frame, or None when more bytes are needed.

        Raises:
            ProtocolError: `frame_too_large` as soon as a header announces it; `invalid_request` for bytes
                that are no MessagePack, or are nested too deeply.
        """
        if not self._scan():
            return None
        frame = self._buffer[: self._position]
        del self._buffer[: self._position]
        self._restart()
        return frame

    def _restart(self) -> None:
        self._position = 0  # of the next header; may lie behind the buffered bytes
        self._open = [1]  # items still missing, per open container; the frame itself is one item
        self._num_items = 1

    def _scan(self) -> bool:
        """Walk headers until the frame is whole (True) or bytes are missing (False)."""
        while self._open:
            if not self._skip_scalars():
                return False
            if self._open[-1] == 0:
                self._open.pop()
            elif not self._enter():
                return False
        return self._position <= len(self._buffer)

    def _skip_scalars(self) -> bool:
        """Pass the run of scalars in the innermost container: the hot loop of a token list."""
        buffer, end, sizes = self._buffer, len(self._buffer), _SCALAR_BYTES
        position, missing = self._position, self._open[-1]
        while missing and position < end and (size := sizes[buffer[position]]):
            position += size
            missing -= 1
        self._position, self._open[-1] = position, missing
        self._check_size(position)
        return not missing or position < end

    def _enter(self) -> bool:
        """Pass a header with a length field, or open a container. False: the header is not whole."""
        first = self._buffer[self._position]
        if 0x80 <= first < 0xA0:
            num_items = (first & 0x0F) * (2 if first < 0x90 else 1)
            return self._open_container(1, num_items)
        if first in _CONTAINERS:
            width, factor = _CONTAINERS[first]
            count = self._length(width)
            return count is not None and self._open_container(1 + width, count * factor)
        if first not in _BLOBS:
            raise ProtocolError("invalid_request", f"byte 0x{first:02x} starts no MessagePack value")
        width, gap = _BLOBS[first]
        length = self._length(width)
        return length is not None and self._pass(1 + width + gap + length)

    def _length(self, width: int) -> int | None:
        start = self._position + 1
        if start + width > len(self._buffer):
            return None
        return int.from_bytes(self._buffer[start : start + width], "big")

    def _pass(self, size_bytes: int) -> bool:
        self._position += size_bytes
        self._open[-1] -= 1
        self._check_size(self._position)
        return True

    def _open_container(self, header_bytes: int, num_items: int) -> bool:
        self._pass(header_bytes)
        self._num_items += num_items
        if self._num_items > self._limits.frame_items_max:
            limit = self._limits.frame_items_max
            raise ProtocolError("frame_too_large", f"a frame holds {limit} values at most", items_max=limit)
        if len(self._open) > self._limits.frame_depth_max:
            limit = self._limits.frame_depth_max
            raise ProtocolError("invalid_request", f"values nest {limit} deep at most", depth_max=limit)
        self._open.append(num_items)
        return True

    def _check_size(self, size_bytes: int) -> None:
        limit = self._limits.frame_bytes_max
        if size_bytes > limit:
            raise ProtocolError("frame_too_large", f"a frame has {limit} bytes at most", bytes_max=limit)


def unpack_frame(frame: bytes | bytearray) -> Any:
    """Build the value of a frame that `FrameReader` passed. Map keys are str, or bytes where bin was sent.

    Strings that are not UTF-8 keep their bytes as surrogates, so that the parameter can be named.

    Raises:
        ProtocolError: `invalid_request`.
    """
    try:
        return msgpack.unpackb(frame, raw=False, unicode_errors="surrogateescape", strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError("invalid_request", f"a frame is no valid MessagePack: {error}") from error
