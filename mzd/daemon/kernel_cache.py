"""Owns the compiled kernels below the state directory: they are thrown away where they may be damaged.

A driver trusts what it finds in its cache. PoCL ends the process over a truncated library, and so would every
later start: hence a note, there while a start uses the cache, that only a start that died leaves behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mzd.daemon.refused_devices import Refusal
from mzd.errors import MzdError

log = logging.getLogger(__name__)

PRODUCTS_FILE: Final = "products.json"
"""Measured choices: checked when read, and no driver's."""

_NOTE: Final = "starting"
_DISCARDED: Final = "discarded"
_EMPTIED, _KEPT = b"emptied", b"kept"
_WRITE_TEST_BYTES: Final = 1024 * 1024

_DAMAGE: Final = frozenset({"BUILD_PROGRAM_FAILURE", "INVALID_KERNEL_NAME", "INVALID_BINARY"})
"""What drivers say of a program whose cached parts are damaged, if they notice."""


class KernelCache:
    """``STATE/kernels``. Whoever uses it holds the lock of the state directory.

    Args:
        path: an existing directory.
        known: refusals of the last start; these are no sign of damage, or every start would compile anew.
    """

    def __init__(self, path: Path, known: tuple[Refusal, ...] = ()) -> None:
        self.path = path
        self._known = known
        self._emptied = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """From before a driver loads until its kernels have run; the note stays only if the process dies.

        Every other dead start in a row keeps the kernels: what kills a start may be a limit of time, and the
        kernels compiled so far are then needed to get to the end.

        Raises:
            MzdError: ``invalid_params``: the note cannot be written.
        """
        note = self.path / _NOTE
        if _read(note) == _KEPT:
            log.warning("the last start died: its compiled kernels may be damaged and are thrown away")
            self.empty()
        with _named_errors(self.path):
            note.write_bytes(_EMPTIED if self._emptied else _KEPT)
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def empty_after(self, refusal: Refusal, error: MzdError) -> bool:
        """Empty the cache if a refusal may come of its damage; at most once a start.

        Returns:
            Whether another try makes sense.
        """
        damaged = error.data.get("opencl_error") in _DAMAGE
        if not damaged or self._emptied or refusal in self._known:
            return False
        log.warning("compiled kernels may be damaged and are thrown away: %s", refusal)
        self.empty()
        return True

    def empty(self) -> None:
        """Throw the compiled kernels away; directories of the first level stay: a driver makes them once."""
        self._emptied = True
        discarded = self.path / _DISCARDED
        shutil.rmtree(discarded, ignore_errors=True)
        with _named_errors(self.path):
            discarded.mkdir(mode=0o700)
            for entry in list(self.path.iterdir()):
                if entry.name not in (PRODUCTS_FILE, _NOTE, _DISCARDED):
                    # Renamed first: dying in the middle of deleting leaves no half of a program.
                    entry.rename(discarded / entry.name)
                    if (discarded / entry.name).is_dir():
                        entry.mkdir(mode=0o700)
        shutil.rmtree(discarded, ignore_errors=True)


def check_writable(directory: Path) -> None:
    """Ask the file system for a MiB in `directory`, and give it back.

    Drivers tell of a disk that is full or read-only as of kernels that do not build.

    Raises:
        MzdError: ``invalid_params``, with the path.
    """
    trial = directory / f".trial-{os.getpid()}"
    with _named_errors(directory):
        try:
            with trial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _WRITE_TEST_BYTES)
        finally:
            trial.unlink(missing_ok=True)


@contextlib.contextmanager
def _named_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MzdError(
            "invalid_params", f"{directory} cannot be written: {error.strerror}", path=str(directory)
        ) from error


def _read(note: Path) -> bytes:
    try:
        return note.read_bytes()
    except OSError:
        return b""
