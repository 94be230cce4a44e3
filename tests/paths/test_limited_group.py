"""Evicting all inside a memory group that has room for one chunk and 8 MiB: nobody is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths.conftest import imported
from tests.paths.synthetic import Shape

ROOT = Path(__file__).parents[2]
HIERARCHIES = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
ROOM_BYTES = 8 << 20
END_S = 300


def make_group(name):
    """A memory group below the root of v1 or v2, or a skip that says why there is none."""
    if os.geteuid() != 0:
        pytest.skip("a memory group is made by root only")
    reasons = []
    for hierarchy in HIERARCHIES:
        group = hierarchy / name
        try:
            group.mkdir()
        except OSError as error:
            reasons.append(f"{hierarchy}: {error.strerror}")
            continue
        if (group / "memory.max").exists() or (group / "memory.limit_in_bytes").exists():
            return group
        group.rmdir()
        reasons.append(f"{hierarchy}: no memory controller")
    pytest.skip("no memory group can be made: " + ", ".join(reasons))
    return None


@pytest.fixture
def group():
    group = make_group(f"mzd-test-{os.getpid()}")
    yield group
    group.rmdir()


@pytest.fixture(scope="module")
def large_store(tmp_path_factory):
    """Twelve layers of 2 MiB: with its KV several times the room that is left."""
    shape = Shape(num_layers=12, hidden=256, ffn=640, heads=8, kv_heads=8, head_dim=64)
    return imported(tmp_path_factory.mktemp("large"), shape, seed=17)


def num_killed(group):
    """Processes of the group that the kernel has killed for memory."""
    for name in ("memory.events", "memory.oom_control"):
        path = group / name
        if path.exists():
            counters = dict(line.split() for line in path.read_text().splitlines())
            return int(counters.get("oom_kill", 0))
    raise FileNotFoundError(f"{group} counts no kills")


def run_child(group, store, state, codec):
    command = [sys.executable, "-m", "tests.paths.limited_child", group, store, state, codec, ROOM_BYTES]
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=END_S, check=False
    )


@pytest.mark.parametrize(("codec", "ways"), [("int8", {"ram", "flash"}), ("none", {"flash"})])
def test_all_is_evicted_where_hardly_anything_is_free(group, large_store, tmp_path, codec, ways):
    """By both ways, and by flash alone: no more than a chunk is allocated, and memory falls at every step."""
    child = run_child(group, large_store, tmp_path, codec)
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["freed_bytes"] == report["resident_bytes"] > 5 * ROOM_BYTES
    assert ways <= set(report["tos"]) <= ways | {"dropped"}
    assert report["warnings"] == []
    assert num_killed(group) == 0


def test_who_takes_memory_instead_is_killed(group, large_store, tmp_path):
    """The limit is a limit: otherwise the tests above would pass whatever an eviction allocates."""
    child = run_child(group, large_store, tmp_path, "hog")
    assert child.returncode == -signal.SIGKILL, child.stderr
