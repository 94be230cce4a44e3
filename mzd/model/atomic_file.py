"""Owns writing a file that appears under its name only when it is whole and on the disk."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from mzd.errors import MzdError

PARTIAL_SUFFIX = ".partial"
# File systems that cannot reserve space say one of these; writing finds out whether there is enough.
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


class AtomicFile:
    """A new file, mode 0600, beside its final path: renamed by `commit`, removed at the end without it.

    Attributes:
        fd: open for reading and writing, owned by this object.

    Raises:
        MzdError: `weights_unavailable` from any method: the disk is full, read-only, or broken.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.fd, temporary = tempfile.mkstemp(PARTIAL_SUFFIX, f".{path.name}.", path.parent)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._temporary: Path | None = Path(temporary)

    def reserve(self, size_bytes: int) -> None:
        """Take the disk space now, so that a full disk is met before the work and not in its middle."""
        try:
            os.ftruncate(self.fd, size_bytes)
            os.posix_fallocate(self.fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise self._cannot_write(error, size_bytes) from error

    def write_at(self, offset_bytes: int, data: memoryview | bytes) -> None:
        """Write all of `data` (C-contiguous bytes); what was never written reads as zero."""
        left = memoryview(data).cast("B")
        try:
            while left:
                written_bytes = os.pwrite(self.fd, left, offset_bytes)
                offset_bytes += written_bytes
                left = left[written_bytes:]
        except OSError as error:
            raise self._cannot_write(error) from error

    def commit(self) -> None:
        """Force the contents to the disk and put the file in place of what was there."""
        if self._temporary is None:
            raise ValueError(f"{self._path} is committed already")
        try:
            os.fsync(self.fd)
            self._temporary.rename(self._path)
            self._temporary = None
            sync_directory(self._path.parent)
        except OSError as error:
            raise self._cannot_write(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.fd)
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _cannot_write(self, error: OSError, needed_bytes: int = 0) -> MzdError:
        needs = f"; {needed_bytes} bytes are needed" if needed_bytes else ""
        return MzdError(
            "weights_unavailable",
            f"cannot write {self._path}: {error.strerror}{needs}",
            path=str(self._path),
            needed_bytes=needed_bytes,
        )


def sync_directory(directory: Path) -> None:
    """A rename is on the disk only when its directory is."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
