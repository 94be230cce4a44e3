"""Owns reading how short memory is: /proc/meminfo, /proc/pressure/memory, the memory control group.

Every probe answers with a reading or with `PressureUnknown` and its reason; none raises, none guesses.
All paths hang below `root`, so that a test can lay out a /proc and a cgroup tree of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from mzd.policy.pressure import CgroupReading, MemoryReading, PressureUnknown, PsiReading

PSI_HINT: Final = "the kernel does not account memory stall: boot with psi=1, if it was built with CONFIG_PSI"
WATCH_VARIABLE: Final = "MEMORY_PRESSURE_WATCH"

_READ_BYTES_MAX: Final = 64 * 1024
_UNLIMITED_BYTES: Final = 1 << 60
"""Version 1 says "no limit" with the largest page-aligned number; nothing real comes near."""

R = TypeVar("R")


class ProbeError(Exception):
    """A probe's file is missing, unreadable, or not in its format."""


def read_probe(path: Path) -> str:
    """The text of a small kernel file, in one read.

    Raises:
        ProbeError: it cannot be read, or is longer than 64 KiB.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, _READ_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ProbeError(f"{path}: {error.strerror}") from error
    if len(text) > _READ_BYTES_MAX:
        raise ProbeError(f"{path}: longer than {_READ_BYTES_MAX} bytes")
    return text.decode("ascii", "replace")


def _known(probe: Callable[[], R]) -> R | PressureUnknown:
    try:
        return probe()
    except ProbeError as error:
        return PressureUnknown(str(error))


# /proc/meminfo


def parse_meminfo(text: str) -> MemoryReading:
    """Read the kernel's figures; what it claims beyond MemTotal is cut to MemTotal.

    Raises:
        ProbeError: a line is missing or holds no number. MemFree is no substitute for MemAvailable: it
            takes the page cache for used.
    """
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    total_bytes = _kib(fields, "MemTotal")
    swap_total_bytes = _kib(fields, "SwapTotal")
    return MemoryReading(
        total_bytes=total_bytes,
        available_bytes=min(_kib(fields, "MemAvailable"), total_bytes),
        swap_total_bytes=swap_total_bytes,
        swap_free_bytes=min(_kib(fields, "SwapFree"), swap_total_bytes),
    )


def _kib(fields: Mapping[str, str], name: str) -> int:
    words = fields.get(name, "").split()
    if not words or not words[0].isdecimal():
        raise ProbeError(f"meminfo has no {name}")
    return int(words[0]) * 1024


# /proc/pressure/memory


def psi_path(root: Path) -> Path:
    """Where the kernel accounts the system's memory stall."""
    return root / "proc/pressure/memory"


def parse_psi(text: str) -> PsiReading:
    """Read both lines of a PSI file.

    Raises:
        ProbeError: `some` or `full` is missing or malformed.
    """
    lines = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    try:
        some, full = (dict(pair.split("=", 1) for pair in lines[kind]) for kind in ("some", "full"))
        return PsiReading(
            some_avg10=float(some["avg10"]),
            full_avg10=float(full["avg10"]),
            some_total_us=int(some["total"]),
            full_total_us=int(full["total"]),
        )
    except (KeyError, ValueError) as error:
        raise ProbeError(f"not a PSI file: {text[:80]!r}") from error


# The memory control group


@dataclass(frozen=True, slots=True)
class CgroupLayout:
    """Where our memory group lies, and how its version names things.

    Attributes:
        mount: the directory of the hierarchy's root, as far as we see it.
        group: our own group's directory, in or below `mount`.
        version: 1 or 2.
    """

    mount: Path
    group: Path
    version: int

    def lineage(self) -> Iterator[Path]:
        """Our group and all above it: a limit anywhere on the way is ours too."""
        yield self.group
        if self.group != self.mount:
            yield from (path for path in self.group.parents if path.is_relative_to(self.mount))


def find_cgroup(root: Path) -> CgroupLayout:
    """Find the group that our memory is charged to.

    Raises:
        ProbeError: there is none, or its directory is out of sight.
    """
    groups = _own_groups(read_probe(root / "proc/self/cgroup"))
    version = 1 if "memory" in groups else 2
    own = groups.get("memory", groups.get(""))
    if own is None:
        raise ProbeError("no memory control group")
    mount_root, mount_point = _memory_mount(read_probe(root / "proc/self/mountinfo"), version)
    mount = root / mount_point.lstrip("/")
    group = mount / _below(own, mount_root)
    # Started in another cgroup namespace, we see a path that is not below our mount: the mount is ours.
    return CgroupLayout(mount, group if group.is_dir() else mount, version)


def _own_groups(text: str) -> dict[str, str]:
    """Path by controller; the unified hierarchy has the name ''."""
    groups = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            groups.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return groups


def _memory_mount(mountinfo: str, version: int) -> tuple[str, str]:
    """(root within the hierarchy, mount point) of the hierarchy that has the memory controller."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        head, tail = before.split(), after.split()
        if len(head) < 5 or len(tail) < 3:
            continue
        is_memory_v1 = tail[0] == "cgroup" and "memory" in tail[2].split(",")
        if is_memory_v1 if version == 1 else tail[0] == "cgroup2":
            return head[3], head[4]
    raise ProbeError("no control group with a memory controller is mounted")


def _below(own: str, mount_root: str) -> str:
    """Our path as seen from the mount, which may show only a part of the hierarchy (containers)."""
    if mount_root != "/" and (own == mount_root or own.startswith(mount_root + "/")):
        own = own[len(mount_root) :]
    return own.lstrip("/")


def read_cgroup(layout: CgroupLayout) -> CgroupReading:
    """The group of our lineage with the least room; our own where none has a limit.

    Raises:
        ProbeError: our own group's usage cannot be read.
    """
    read = _read_group_v1 if layout.version == 1 else _read_group_v2
    readings = [reading for path in layout.lineage() if (reading := read(path)) is not None]
    if not readings:
        raise ProbeError(f"{layout.group}: no memory controller")
    limited = [
        (r.available_in(r.limit_bytes), i) for i, r in enumerate(readings) if r.limit_bytes is not None
    ]
    return readings[min(limited)[1]] if limited else readings[0]


def _read_group_v2(path: Path) -> CgroupReading | None:
    """None where the group has no memory controller, as the root has none."""
    if not (path / "memory.current").exists():
        return None
    limits = [_limit(path / name) for name in ("memory.max", "memory.high")]
    limit_bytes = min((limit for limit in limits if limit is not None), default=None)
    usage_bytes = _number(path / "memory.current")
    reclaimable = _reclaimable(path, "", "file_") if limit_bytes is not None else 0
    return CgroupReading(str(path), usage_bytes, min(reclaimable, usage_bytes), limit_bytes)


def _read_group_v1(path: Path) -> CgroupReading | None:
    if not (path / "memory.usage_in_bytes").exists():
        return None
    limit_bytes = _limit(path / "memory.limit_in_bytes")
    usage_bytes = _number(path / "memory.usage_in_bytes")
    reclaimable = _reclaimable(path, "total_", "total_") if limit_bytes is not None else 0
    return CgroupReading(str(path), usage_bytes, min(reclaimable, usage_bytes), limit_bytes)


def _number(path: Path) -> int:
    text = read_probe(path).strip()
    if not text.isdecimal():
        raise ProbeError(f"{path}: {text[:80]!r} is no number")
    return int(text)


def _limit(path: Path) -> int | None:
    """None for no limit, be it by its name, its size, or because the kernel has no such file."""
    if not path.exists() or read_probe(path).strip() == "max":
        return None
    limit_bytes = _number(path)
    return limit_bytes if limit_bytes < _UNLIMITED_BYTES else None


def _reclaimable(path: Path, lru_prefix: str, dirty_prefix: str) -> int:
    """Page cache that can go at once: on the file lists (tmpfs is not), and clean."""
    pairs = (line.split() for line in read_probe(path / "memory.stat").splitlines())
    stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    cached = stat.get(f"{lru_prefix}inactive_file", 0) + stat.get(f"{lru_prefix}active_file", 0)
    dirty = stat.get(f"{dirty_prefix}dirty", 0) + stat.get(f"{dirty_prefix}writeback", 0)
    return max(0, cached - dirty)


@dataclass(frozen=True, slots=True)
class PressureProbes:
    """All probes of one machine.

    Attributes:
        cgroup: our memory group, found once: a process rarely moves.
        psi_off: why stall is not to be read although the kernel may account it; None if it is.
    """

    root: Path
    cgroup: CgroupLayout | PressureUnknown
    psi_off: PressureUnknown | None = None

    @classmethod
    def open(cls, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> PressureProbes:
        """Find what there is to read. The administrator turns stall off with `/dev/null`."""
        off = None
        if environ.get(WATCH_VARIABLE) == "/dev/null":
            off = PressureUnknown(f"turned off by {WATCH_VARIABLE}=/dev/null")
        return cls(root, _known(lambda: find_cgroup(root)), off)

    def memory(self) -> MemoryReading | PressureUnknown:
        """The system's memory now."""
        return _known(lambda: parse_meminfo(read_probe(self.root / "proc/meminfo")))

    def psi(self) -> PsiReading | PressureUnknown:
        """The system's memory stall now."""
        if self.psi_off is not None:
            return self.psi_off
        reading = _known(lambda: parse_psi(read_probe(psi_path(self.root))))
        if isinstance(reading, PressureUnknown):
            return PressureUnknown(f"{reading.reason}; {PSI_HINT}")
        return reading

    def cgroup_memory(self) -> CgroupReading | PressureUnknown:
        """The tightest memory group that we are in, now."""
        layout = self.cgroup
        if isinstance(layout, PressureUnknown):
            return layout
        return _known(lambda: read_cgroup(layout))
