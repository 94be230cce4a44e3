"""Owns reading untrusted bytes front to back: nothing is read or allocated that the file cannot hold."""

from __future__ import annotations

import struct
from collections.abc import Callable

from mzd.errors import FormatError

ReadAt = Callable[
    [int, int], bytes
]  # (offset_bytes, size_bytes) -> up to size_bytes; fewer at the file's end
Fail = Callable[[str], FormatError]  # a reason -> the error to raise, with the facts of the file added

BUFFER_BYTES = 256 * 1024  # a few hundred reads for the largest headers, and little to lose for the smallest

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class BoundedReader:
    """Little-endian values from `[0, limit_bytes)` of a file, in order, through one small buffer.

    Every size is checked against what is left before anything is made for it. All methods raise the
    error made by `fail` when the bytes are not there, or not what they must be.

    Args:
        read_at: reads the file by position.
        limit_bytes: where reading must end; at most the size of the file.
        fail: makes the error.
    """

    def __init__(self, read_at: ReadAt, limit_bytes: int, fail: Fail) -> None:
        self._read_at = read_at
        self._limit_bytes = limit_bytes
        self._fail = fail
        self._buffer = b""
        self._buffer_offset_bytes = 0
        self._at = 0

    @property
    def offset_bytes(self) -> int:
        """Position in the file of the next byte."""
        return self._buffer_offset_bytes + self._at

    def require(self, size_bytes: int, what: str) -> None:
        """Check that `size_bytes` more bytes can be read; call it before allocating for a count."""
        left_bytes = self._limit_bytes - self.offset_bytes
        if size_bytes > left_bytes:
            raise self._fail(
                f"{what} at byte {self.offset_bytes} needs {size_bytes} bytes, {left_bytes} are left"
            )

    def take(self, size_bytes: int, what: str) -> bytes:
        """The next `size_bytes` bytes."""
        self._fill(size_bytes, what)
        start = self._at
        self._at += size_bytes
        return self._buffer[start : self._at]

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit number."""
        number: int = _U32.unpack(self.take(_U32.size, what))[0]
        return number

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit number."""
        number: int = _U64.unpack(self.take(_U64.size, what))[0]
        return number

    def string(self, what: str) -> str:
        """The next string: its length as u64, then that many bytes of UTF-8."""
        data = self.take(self.u64(f"length of {what}"), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"{what} before byte {self.offset_bytes} is not UTF-8") from error

    def strings(self, count: int, what: str) -> tuple[str, ...]:
        """The next `count` strings; a vocabulary of 150,000 takes tens of milliseconds."""
        self.require(count * _U64.size, what)
        texts: list[str] = []
        while len(texts) < count:
            texts += self._buffered_strings(count - len(texts), what)
            if len(texts) < count:
                texts.append(self.string(what))  # the one that crosses the end of the buffer
        return tuple(texts)

    def _buffered_strings(self, count_max: int, what: str) -> list[str]:
        """Up to `count_max` strings that lie whole in the buffer: the inner loop of a vocabulary."""
        texts: list[str] = []
        buffer, at, end = self._buffer, self._at, len(self._buffer)
        try:
            while len(texts) < count_max and at + _U64.size <= end:
                start = at + _U64.size
                stop = start + _U64.unpack_from(buffer, at)[0]
                if stop > end:
                    break
                texts.append(buffer[start:stop].decode())
                at = stop
        except UnicodeDecodeError as error:
            raise self._fail(
                f"{what} at byte {self._buffer_offset_bytes + at} holds a string that is not UTF-8"
            ) from error
        self._at = at
        return texts

    def _fill(self, size_bytes: int, what: str) -> None:
        """Have the next `size_bytes` bytes in the buffer."""
        if len(self._buffer) - self._at >= size_bytes:
            return
        self.require(size_bytes, what)
        offset_bytes = self.offset_bytes
        wanted_bytes = min(max(size_bytes, BUFFER_BYTES), self._limit_bytes - offset_bytes)
        self._buffer = self._read_at(offset_bytes, wanted_bytes)
        self._buffer_offset_bytes = offset_bytes
        self._at = 0
        if len(self._buffer) < size_bytes:
            raise self._fail(f"the file ended early, at byte {offset_bytes + len(self._buffer)}, in {what}")
