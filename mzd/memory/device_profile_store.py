"""Owns the file of measured device profiles: its format, its checks, its replacement as a whole."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from mzd import native
from mzd.memory.context_directory import storage_error, write_all
from mzd.policy.profile import DeviceProfile, ProfileSource

log = logging.getLogger(__name__)

PROFILE_FILE: Final = "profile.json"
FORMAT: Final = 1
"""Of the file, and of what its figures mean: another number makes every device be measured anew."""

PROFILES_MAX: Final = 16
"""Kept at the most, the oldest goes: devices and codecs that somebody compares, not a history."""

_FILE_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile(DeviceProfile):
    """A profile with what was measured besides: plans do not need it, people do.

    The throughputs that it inherits were measured side by side, as a restore runs its two paths.

    Attributes:
        read_alone_bytes_per_s: direct reads while nothing is decoded.
        release_s_per_mb: seconds to give 10^6 resident bytes back.

    Raises:
        ValueError: a figure is not a positive, finite number.
    """

    read_alone_bytes_per_s: float
    release_s_per_mb: float

    def __post_init__(self) -> None:
        DeviceProfile.__post_init__(self)  # super() does not find its class in one that has slots
        for name in ("read_alone_bytes_per_s", "release_s_per_mb"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, not {value}")


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile depends on; where any of it differs, the device is measured anew.

    Attributes:
        device, driver: as OpenCL says them; a CPU device's name is the processor's.
        codec, codec_version: whose decoding was measured.
        program_version: of mzd, whose code does the work.
        threads: of each kind of work, by name.
        cores: that the threads are pinned to; empty means any.
        huge_pages: whether memory comes in huge pages.
        file_systems: `f_fsid` of where weights and state lie.
    """

    device: str
    driver: str
    codec: str
    codec_version: int
    program_version: str
    threads: Mapping[str, int]
    cores: tuple[int, ...]
    huge_pages: bool
    file_systems: tuple[int, ...]


class DeviceProfileStore:
    """`STATE/profile.json`: a few profiles, the newest first, under one checksum.

    A file that is damaged in any way counts as none: a measurement costs a second, a wrong figure the
    balance of every restore.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, key: ProfileKey) -> MeasuredProfile | None:
        """What was measured for `key`; None if nothing was, or the file is of no use."""
        try:
            entries = self._entries()
            return next((_profile(entry) for entry in entries if entry["key"] == _plain(key)), None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("profile: passed over: file=%s reason=%s", self.path, error)
            return None

    def save(self, key: ProfileKey, profile: MeasuredProfile) -> None:
        """Keep `profile` as the newest, in place of an older one of the same key.

        Raises:
            MzdError: `swap_full` or `internal`; the file is as it was.
        """
        others: list[Any] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            others = [entry for entry in self._entries() if entry["key"] != _plain(key)]
        entries = [{"key": _plain(key), "profile": _plain(profile)}, *others][:PROFILES_MAX]
        document = {"format": FORMAT, "crc32c": _checksum(entries), "profiles": entries}
        try:
            _replace(self.path, json.dumps(document, indent=1).encode())
        except OSError as error:
            raise storage_error(str(self.path), error.errno or 0) from error

    def _entries(self) -> list[Any]:
        """The entries of a file that is whole.

        Raises:
            FileNotFoundError: there is none.
            OSError, ValueError, KeyError, TypeError: it cannot be read, or is not what was written.
        """
        document = json.loads(_read(self.path))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {FORMAT}")
        entries = document["profiles"]
        if document["crc32c"] != _checksum(entries):
            raise ValueError("its checksum does not fit")
        return list(entries)


def _plain(value: Any) -> Any:
    """A dataclass as JSON gives it back: tuples are lists, all keys strings."""
    return json.loads(json.dumps(asdict(value)))


def _checksum(entries: Any) -> str:
    """CRC-32C of the content, however it is laid out: a person may have indented it."""
    canonical = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return f"{native.crc32c_buffer(canonical.encode()):08x}"


def _profile(entry: Mapping[str, Any]) -> MeasuredProfile:
    """The entry's profile; its names and types must be those of the class, exactly."""
    figures = dict(entry["profile"])
    source = ProfileSource(figures.pop("source"))
    if source is not ProfileSource.MEASURED or not all(type(value) is float for value in figures.values()):
        raise ValueError("an entry holds something else than measured figures")
    if figures.keys() != {field.name for field in fields(MeasuredProfile)} - {"source"}:
        raise ValueError("an entry's figures are not those of this version")
    return MeasuredProfile(**figures)


def _read(path: Path) -> bytes:
    """All of a plain, short file of ours; no link is followed, and a FIFO does not hold us up."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is not a regular file of this user")
        if status.st_size > _FILE_BYTES_MAX:
            raise ValueError(f"it has {status.st_size} bytes")
        return file.read(_FILE_BYTES_MAX)


def _replace(path: Path, content: bytes) -> None:
    """Put `content` at `path`, mode 0600, so that a crash leaves the old file or the new one."""
    fd, temporary = tempfile.mkstemp(".new", f".{path.name}.", path.parent)
    try:
        with open(fd, "rb"):  # closes it
            write_all(fd, content, 0)
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
