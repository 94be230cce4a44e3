"""Owns what a result says about where it was measured: machine, commit, state of the page cache."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import mzd

_CACHES = Path("/proc/sys/vm/drop_caches")
_CPU_INFO = Path("/proc/cpuinfo")
_GIT_TIMEOUT_S = 20.0


def machine_name() -> str:
    """Processor, usable cores, memory and kernel, in one line."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return f"{_cpu_name()}, {cores} cores, {memory_bytes / 2**30:.0f} GiB, Linux {platform.release()}"


def _cpu_name() -> str:
    """What /proc/cpuinfo calls the processor; ARM kernels may not say."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return named.get("model name") or named.get("Model") or platform.machine()


def commit_name() -> str:
    """The commit of the source tree that runs, `+changes` if it differs, else the installed version."""
    root = Path(mzd.__file__).parent.parent
    if not (root / ".git").exists():
        return f"v{mzd.__version__}"
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "mzd", "native")
    return commit + ("+changes" if changed else "") if commit else f"v{mzd.__version__}"


def _git(root: Path, *arguments: str) -> str:
    """What git says, or nothing where it cannot be asked."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def today() -> str:
    """The date of a result, UTC."""
    return datetime.now(UTC).date().isoformat()


def drop_page_cache() -> bool:
    """Write dirty pages back and drop the page cache; False where this user may not."""
    if not os.access(_CACHES, os.W_OK):
        return False
    os.sync()
    try:
        _CACHES.write_text("3\n")
    except OSError:  # a container may show the file and refuse the write
        return False
    return True
