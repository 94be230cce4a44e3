"""Owns reading a model's GGUF files for import: by position for headers, then once front to back, hashed."""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError, MzdError
from mzd.formats.gguf_split import part_names

_SKIP_BYTES = 4 * 1024**2  # what is read at a time where only the hash wants it
_MISSING_SHOWN_MAX = 8

Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)


def source_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model that a GGUF file is, or is a part of, in order; they lie in one directory.

    Raises:
        MzdError: `not_found` if a part is given that is not there; `invalid_model` naming the other parts
            that are not, or for a name that no part has.
    """
    paths = tuple(path.parent / name for name in part_names(path.name))
    if len(paths) == 1:
        return paths  # opening it tells whether it is there
    missing = [part.name for part in paths if not os.path.exists(part)]
    if path.name in missing:
        raise _not_found(path)
    if missing:
        more = ", ..." if len(missing) > _MISSING_SHOWN_MAX else ""
        shown = ", ".join(missing[:_MISSING_SHOWN_MAX]) + more
        raise FormatError(
            f"{path}: {len(missing)} of the {len(paths)} files of this model missing beside it: {shown}",
            path=str(path),
            missing=missing[:_MISSING_SHOWN_MAX],
        )
    return paths


class SourcePart:
    """One open GGUF file. Reads, never maps: a file that shrinks meanwhile is an error and not a SIGBUS.

    Raises:
        MzdError: `not_found`; `invalid_model` for what is no regular file or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def check_unchanged(self) -> None:
        """Raise MzdError `model_changed` if the file is not what was opened."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._at_open.st_size, self._at_open.st_mtime_ns):
            raise self.changed("was written to")

    def changed(self, how: str) -> MzdError:
        """The error for a file that did not stay as it was."""
        return MzdError(
            "model_changed", f"{self.path}: {how} while it was imported; try again", path=str(self.path)
        )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _pread(self, offset_bytes: int, size_bytes: int) -> bytes:
        try:
            return os.pread(self._fd, size_bytes, offset_bytes)
        except OSError as error:
            raise FormatError(
                f"{self.path}: cannot be read at byte {offset_bytes}: {error.strerror}", path=str(self.path)
            ) from error


class SourceReader:
    """The open files of a model. Positions and the hash are of all of them, laid end to end.

    Args:
        paths: from `source_paths`.
        progress: called after each sequential read with (done_bytes, total_bytes); it may raise to stop.

    Attributes:
        parts: the files, in order.
        size_bytes: of all files together, when they were opened.

    Raises:
        MzdError: as `SourcePart`.
    """

    def __init__(self, paths: Sequence[Path], progress: Progress | None = None) -> None:
        self._progress = progress
        self._sha256 = hashlib.sha256()
        self._position_bytes = 0
        with ExitStack() as opened:
            parts: list[SourcePart] = []
            for path in paths:
                parts.append(SourcePart(path))
                opened.callback(parts[-1].close)
            self._files = opened.pop_all()
        self.parts = tuple(parts)
        *self._starts, self.size_bytes = accumulate((part.size_bytes for part in parts), initial=0)

    def read_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` bytes at a position; fewer only at the end of the file that it is in."""
        number = self._part_number(offset_bytes)
        return self.parts[number].read_at(offset_bytes - self._starts[number], size_bytes)

    def read_next(self, size_bytes: int) -> NDArray[np.uint8]:
        """The next bytes of the sequential pass, as (size_bytes,) uint8 of one file; they go into the hash.

        Raises:
            MzdError: `model_changed` if the file has become shorter.
        """
        number = self._part_number(self._position_bytes)
        part, offset_bytes = self.parts[number], self._position_bytes - self._starts[number]
        data = part.read_at(offset_bytes, size_bytes)
        if len(data) < size_bytes:
            raise part.changed(f"ended at byte {offset_bytes + len(data)}")
        self._sha256.update(data)
        self._position_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._position_bytes, self.size_bytes)
        return np.frombuffer(data, np.uint8)

    def skip_to(self, offset_bytes: int) -> None:
        """Move the sequential pass forward; what lies between goes into the hash."""
        while self._position_bytes < offset_bytes:
            number = self._part_number(self._position_bytes)
            end_bytes = min(offset_bytes, self._starts[number] + self.parts[number].size_bytes)
            self.read_next(min(_SKIP_BYTES, end_bytes - self._position_bytes))

    def finish(self) -> str:
        """Read to the end and return the SHA-256, in hex, of all files one after another.

        Raises:
            MzdError: `model_changed` if a file is not what was opened.
        """
        self.skip_to(self.size_bytes)
        for part in self.parts:
            part.check_unchanged()
        return self._sha256.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._files.close()

    def _part_number(self, offset_bytes: int) -> int:
        """Which file a position is in."""
        return bisect_right(self._starts, offset_bytes) - 1


def _open(path: Path) -> int:
    """Open for reading; O_NONBLOCK so that a FIFO is refused instead of waited for."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _not_found(path) from None
    except OSError as error:
        raise FormatError(f"{path} cannot be opened: {error.strerror}", path=str(path)) from error


def _not_found(path: Path) -> MzdError:
    return MzdError("not_found", f"there is no file {path}", path=str(path))
