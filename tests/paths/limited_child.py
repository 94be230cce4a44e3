"""Owns the child of test_limited_group.py: a daemon whose memory group gets a limit just before it evicts.

Run as `python -m tests.paths.limited_child GROUP STORE STATE CODEC EXTRA_BYTES`. GROUP is the directory of a
memory group of its own; EXTRA_BYTES of room are left. Prints one JSON map. With the codec `hog` it takes
memory instead of giving any, and must not live to the end.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import trio

from mzd.device.opencl import OpenClDevice
from tests.paths.harness import open_daemon

CONTEXT_TOKENS = 1500
HOG_BYTES = 64 << 20


class MemoryGroup:
    """A memory group that this process is in; of v1 or v2, whichever files it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_v2 = (path / "memory.max").exists()
        (path / "cgroup.procs").write_text(str(os.getpid()))

    def usage_bytes(self) -> int:
        name = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        return int((self._path / name).read_text())

    def limit(self, size_bytes: int) -> None:
        name = "memory.max" if self._is_v2 else "memory.limit_in_bytes"
        (self._path / name).write_text(str(size_bytes))


def drop_page_cache(*directories: Path) -> None:
    """Files in the page cache count as the group's, and would make room under a limit."""
    os.sync()
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


async def main(group: MemoryGroup, store: Path, state: Path, codec: str, extra_bytes: int) -> None:
    device = OpenClDevice.open()
    async with open_daemon(device, store, state, codec="none" if codec == "hog" else codec) as daemon:
        tokens = np.random.default_rng(1).integers(5, 320, CONTEXT_TOKENS).tolist()
        await daemon.generate("c", tokens)
        await daemon.settle()
        drop_page_cache(store.parent, state)
        resident_bytes = daemon.reporter.resident_bytes()
        group.limit(group.usage_bytes() + daemon.units.kv_sizes.chunk_bytes + extra_bytes)
        if codec == "hog":
            take(HOG_BYTES)
        result = await daemon.evict()
        states = sorted(daemon.states("c"))
    tos = sorted({step["to"] for step in result["steps"]})
    report = {"freed_bytes": result["freed_bytes"], "resident_bytes": resident_bytes, "tos": tos}
    print(json.dumps(report | {"states": states, "warnings": result["warnings"]}))


def take(size_bytes: int) -> None:
    """Make so much memory resident."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, size_bytes, mmap.PAGESIZE):
        memory[offset] = 1


if __name__ == "__main__":
    group_path, store_path, state_path, codec_name, extra = sys.argv[1:]
    trio.run(main, MemoryGroup(Path(group_path)), Path(store_path), Path(state_path), codec_name, int(extra))
