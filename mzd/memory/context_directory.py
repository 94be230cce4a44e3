"""Owns the directory of contexts: names, modes, and how files below it are opened and replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from mzd.errors import MzdError

TOKEN_LOG = "tokens"
SWAP_DATA = "swap"
SWAP_JOURNAL = "swap.journal"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TEMPORARY_SUFFIX = ".new"
_FILE_BYTES_MAX = 1 << 30


def check_context_name(name: str) -> str:
    """Return `name` if it may name a context, and so a directory.

    Raises:
        MzdError: `invalid_params`.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise MzdError(
            "invalid_params",
            "a context's name has 1 to 64 letters, digits, dots, dashes or underscores",
            parameter="context",
        )
    return name


class OpenFile:
    """An open file that closes itself when nobody refers to it any more.

    Whoever reads or writes in a thread holds on to this object, not to the number: else dropping a
    context could close the number under the thread, and the next open would give it to another file.

    Attributes:
        fd: the descriptor.
        direct: whether reads and writes bypass the page cache (and must be aligned to 4096 bytes).
    """

    __slots__ = ("__weakref__", "direct", "fd")

    def __init__(self, fd: int, *, direct: bool = False) -> None:
        self.fd = fd
        self.direct = direct
        weakref.finalize(self, os.close, fd)


class ContextDirectory:
    """`STATE/contexts`: one directory a context. One daemon at a time holds it.

    Directories are 0700, files 0600. No component below `path` is ever followed if it is a symbolic
    link, and what is not ours is refused.

    Raises:
        MzdError: `busy`, another process holds the directory; `internal`, it is not ours.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._fd = _open_directory(str(path), None)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise MzdError("busy", f"another process uses {path}", path=str(path)) from None

    def close(self) -> None:
        """Let another process have the directory. Files that are open stay so."""
        os.close(self._fd)

    def names(self) -> list[str]:
        """Contexts that have a directory, sorted; what cannot be a context is passed over."""
        with os.scandir(self._fd) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(name for name in found if _NAME.fullmatch(name))

    @contextlib.contextmanager
    def _opened(self, name: str, *, create: bool = False) -> Iterator[int]:
        """A descriptor of a context's directory."""
        check_context_name(name)
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)
        fd = _open_directory(name, self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def open_file(self, context: str, filename: str, *, create: bool, direct: bool = False) -> OpenFile:
        """Open a context's file for reading and writing.

        Args:
            create: make directory and file if they are missing.
            direct: bypass the page cache where the file system can.

        Raises:
            FileNotFoundError: it is missing, and `create` is False.
            MzdError: `internal`; a symbolic link, no regular file, or not ours.
            MzdError: `swap_full`; there is no space to create it.
        """
        with _named_errors(f"{context}/{filename}"), self._opened(context, create=create) as directory:
            flags = os.O_RDWR | (os.O_CREAT if create else 0)
            return _open_regular(filename, flags, directory, direct=direct)

    def read_file(self, context: str, filename: str) -> bytes:
        """A context's whole file.

        Raises:
            FileNotFoundError: it is missing.
            MzdError: `internal`; not a plain file of ours, or over 1 GiB.
        """
        file = self.open_file(context, filename, create=False)
        size_bytes = os.fstat(file.fd).st_size
        if size_bytes > _FILE_BYTES_MAX:
            raise MzdError("internal", f"{context}/{filename} has {size_bytes} bytes", size_bytes=size_bytes)
        with open(file.fd, "rb", closefd=False) as reader:
            return reader.read(size_bytes)

    def modified_s(self, context: str, filename: str) -> float:
        """When a context's file was written last, by the wall clock.

        Raises:
            FileNotFoundError: it is missing.
            MzdError: `internal`; not a plain file of ours.
        """
        file = self.open_file(context, filename, create=False)
        return os.fstat(file.fd).st_mtime

    def replace_file(self, context: str, filename: str, content: bytes) -> OpenFile:
        """Put `content` in place of a file, so that a crash leaves the old one or the new one, and open it.

        Raises:
            MzdError: `swap_full`; there is no space. The old file is as it was.
        """
        temporary = filename + _TEMPORARY_SUFFIX
        with _named_errors(f"{context}/{filename}"), self._opened(context, create=True) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
            file = _open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, directory)
            write_all(file.fd, content, 0)
            os.fdatasync(file.fd)  # or a reboot could find the new name with the content of neither
            os.rename(temporary, filename, src_dir_fd=directory, dst_dir_fd=directory)
            return file

    def remove(self, context: str) -> bool:
        """Remove a context with all its files; False if there is none.

        Raises:
            MzdError: `internal`; the directory is a link or not ours, or holds a directory.
        """
        try:
            with _named_errors(context), self._opened(context) as directory:
                for entry in os.listdir(directory):
                    os.unlink(entry, dir_fd=directory)
        except FileNotFoundError:
            return False
        with _named_errors(context):
            os.rmdir(context, dir_fd=self._fd)
        return True


def write_all(fd: int, content: bytes, offset_bytes: int) -> None:
    """Write all of `content` at an offset of a buffered file.

    Raises:
        OSError: and then an unknown part of it is written.
    """
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


def storage_error(what: str, code: int) -> MzdError:
    """The error that a client sees when `what` cannot be written; `code` is an errno."""
    if code in (errno.ENOSPC, errno.EDQUOT):
        return MzdError("swap_full", f"no space is left to write {what}", errno=code)
    return MzdError("internal", f"{what} cannot be used: {os.strerror(code)}", errno=code)


@contextlib.contextmanager
def _named_errors(what: str) -> Iterator[None]:
    """Turn OSError into MzdError, but for a missing file, which callers expect."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(what, error.errno or errno.EIO) from error


def _open_directory(name: str, parent: int | None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise MzdError("internal", f"{name} is not a directory, or a symbolic link", path=name) from error
        raise
    return _checked(fd, name, 0o700)


def _open_regular(name: str, flags: int, directory: int, *, direct: bool = False) -> OpenFile:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hold us up
    if direct:
        with contextlib.suppress(OSError):  # e.g. EINVAL: a file system without direct I/O
            return OpenFile(_open_checked(name, flags | os.O_DIRECT, directory), direct=True)
    return OpenFile(_open_checked(name, flags, directory))


def _open_checked(name: str, flags: int, directory: int) -> int:
    try:
        fd = os.open(name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise MzdError("internal", f"{name} is a symbolic link", path=name) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise MzdError("internal", f"{name} is not a regular file", path=name)
    return _checked(fd, name, 0o600)


def _checked(fd: int, name: str, mode: int) -> int:
    """Refuse what another user owns; take away rights that others have."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        os.close(fd)
        raise MzdError("internal", f"{name} belongs to user {status.st_uid}", path=name, uid=status.st_uid)
    if stat.S_IMODE(status.st_mode) & 0o077:
        os.fchmod(fd, mode)
    return fd
