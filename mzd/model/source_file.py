"""Owns reading a GGUF file for import: by position for its header, then once front to back with its hash."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError, MzdError

_SKIP_BYTES = 4 * 1024**2  # what is read at a time where only the hash wants it

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)


class SourceReader:
    """An open GGUF file. Reads, never maps: a file that shrinks meanwhile is an error and not a SIGBUS.

    Args:
        progress: called after each sequential read with (done_bytes, total_bytes); it may raise to stop.

    Raises:
        MzdError: `not_found`; `invalid_model` for what is no regular file or cannot be read.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self._progress = progress
        self._sha256 = hashlib.sha256()
        self._position_bytes = 0
        self._fd = _open(path)
        self._at_open = os.fstat(self._fd)
        if not stat.S_ISREG(self._at_open.st_mode):
            os.close(self._fd)
            raise FormatError(f"{path} is not a regular file", path=str(path))

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""
        return self._at_open.st_size

    def read_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` bytes at a position; fewer only at the end of the file."""
        pieces: list[bytes] = []
        while size_bytes > 0:
            piece = self._pread(offset_bytes, size_bytes)
            if not piece:
                break
            pieces.append(piece)
            offset_bytes += len(piece)
            size_bytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_next(self, size_bytes: int) -> NDArray[np.uint8]:
        """The next bytes of the sequential pass, as (size_bytes,) uint8; they go into the hash.

        Raises:
            MzdError: `model_changed` if the file has become shorter.
        """
        data = self.read_at(self._position_bytes, size_bytes)
        if len(data) < size_bytes:
            raise self._changed(f"ended at byte {self._position_bytes + len(data)}")
        self._sha256.update(data)
        self._position_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._position_bytes, self.size_bytes)
        return np.frombuffer(data, np.uint8)

    def skip_to(self, offset_bytes: int) -> None:
        """Move the sequential pass forward; what lies between goes into the hash."""
        while self._position_bytes < offset_bytes:
            self.read_next(min(_SKIP_BYTES, offset_bytes - self._position_bytes))

    def finish(self) -> str:
        """Read to the end and return the SHA-256 of the whole file in hex.

        Raises:
            MzdError: `model_changed` if the file is not what was opened.
        """
        self.skip_to(self.size_bytes)
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._at_open.st_size, self._at_open.st_mtime_ns):
            raise self._changed("was written to")
        return self._sha256.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def _pread(self, offset_bytes: int, size_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, size_bytes, offset_bytes)
        except OSError as error:
            raise FormatError(
                f"{self.path}: cannot be read at byte {offset_bytes}: {error.strerror}", path=str(self.path)
            ) from error

    def _changed(self, how: str) -> MzdError:
        return MzdError(
            "model_changed", f"{self.path}: {how} while it was imported; try again", path=str(self.path)
        )


def _open(path: Path) -> int:
    """Open for reading; O_NONBLOCK so that a FIFO is refused instead of waited for."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MzdError("not_found", f"there is no file {path}", path=str(path)) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be opened: {error.strerror}", path=str(path)) from error
