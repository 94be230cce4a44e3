"""Owns what the system says about a process's memory on a device, which its resident set does not count."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NVIDIA_QUERY = (
    "nvidia-smi",
    "--query-compute-apps=pid,used_gpu_memory",
    "--format=csv,noheader,nounits",
)
NVIDIA_TIMEOUT_S = 10.0

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one process on devices, and who says so (`kgsl`, `drm` or `nvidia-smi`)."""

    size_bytes: int
    source: str


def read_device_memory(
    pid: int, root: Path = Path("/"), ask: Callable[[], str] | None = None
) -> DeviceMemory | None:
    """Ask whoever knows; None where nobody does, as on a device that works on the process's own pages.

    Args:
        root: where /proc and /sys are.
        ask: returns what `NVIDIA_QUERY` prints; raises OSError or SubprocessError.
    """
    found = {"kgsl": _of_kgsl(pid, root), "drm": _of_drm(pid, root), "nvidia-smi": _of_nvidia(pid, ask)}
    return next((DeviceMemory(size, source) for source, size in found.items() if size is not None), None)


def _of_kgsl(pid: int, root: Path) -> int | None:
    """Adreno's driver counts what is mapped for the CPU and what is not in two files."""
    directory = root / "sys/class/kgsl/kgsl/proc" / str(pid)
    try:
        return sum(int((directory / name).read_text()) for name in ("gpumem_mapped", "gpumem_unmapped"))
    except (OSError, ValueError):
        return None


def _of_drm(pid: int, root: Path) -> int | None:
    """`drm-resident-*` keys (else `drm-memory-*`) of each client, which may hold several descriptors."""
    clients: dict[str, int] = {}
    try:
        files = list((root / "proc" / str(pid) / "fdinfo").iterdir())
    except OSError:
        return None
    for file in files:
        try:
            keys = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
            if "drm-client-id" in keys:
                clients[keys["drm-client-id"].strip()] = _drm_bytes(keys)
        except (OSError, ValueError):
            continue
    return sum(clients.values()) if clients else None


def _drm_bytes(keys: dict[str, str]) -> int:
    for prefix in ("drm-resident-", "drm-memory-"):
        values = [value.split() for key, value in keys.items() if key.startswith(prefix)]
        if values:
            return sum(int(value[0]) * _UNITS["".join(value[1:])] for value in values)
    return 0


def _of_nvidia(pid: int, ask: Callable[[], str] | None) -> int | None:
    try:
        lines = (ask or _ask_nvidia)().splitlines()
        rows = [line.split(",") for line in lines if "," in line]
        sizes = [int(row[1]) << 20 for row in rows if int(row[0]) == pid]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return sum(sizes) if sizes else None


def _ask_nvidia() -> str:
    done = subprocess.run(NVIDIA_QUERY, capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S, check=True)
    return done.stdout
