"""Probes on a fake /proc and cgroup tree, and what they say when something is missing."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.memory.pressure_sources import (
    PressureProbes,
    ProbeError,
    parse_meminfo,
    parse_psi,
    read_probe,
)
from mzd.policy.pressure import PressureUnknown, PsiReading

MIB = 1024 * 1024

MEMINFO = """MemTotal:        8000000 kB
MemFree:          100000 kB
MemAvailable:    5000000 kB
Cached:          4900000 kB
SwapTotal:       1000000 kB
SwapFree:         800000 kB
HugePages_Total:       0
"""
PSI = """some avg10=12.50 avg60=3.00 avg300=1.00 total=123456
full avg10=4.25 avg60=1.00 avg300=0.50 total=65432
"""
MOUNT_V2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNTS_V1 = (
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def probes_of(root, files, environ=None):
    write_tree(root, files)
    return PressureProbes.open(root, environ or {})


def v2_group(path, *, current, limit="max", high="max", stat=""):
    base = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{base}/memory.current": f"{current}\n",
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.high": f"{high}\n",
        f"{base}/memory.stat": stat,
    }


def v1_group(path, *, usage, limit, stat=""):
    base = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    return {
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.stat": stat,
    }


# meminfo


def test_available_is_what_the_kernel_says_page_cache_included(tmp_path):
    reading = probes_of(tmp_path, {"proc/meminfo": MEMINFO}).memory()
    assert reading.available_bytes == 5_000_000 * 1024
    assert reading.total_bytes == 8_000_000 * 1024
    assert (reading.swap_total_bytes, reading.swap_free_bytes) == (1_000_000 * 1024, 800_000 * 1024)


def test_odd_totals_are_cut_not_believed():
    odd = MEMINFO.replace("MemAvailable:    5000000", "MemAvailable: 9000000").replace(
        "800000 kB", "9999999 kB"
    )
    reading = parse_meminfo(odd)
    assert reading.available_bytes == reading.total_bytes
    assert reading.swap_free_bytes == reading.swap_total_bytes


@pytest.mark.parametrize("name", ["MemTotal", "MemAvailable", "SwapTotal", "SwapFree"])
def test_a_missing_line_is_unknown_and_named(tmp_path, name):
    reading = probes_of(tmp_path, {"proc/meminfo": MEMINFO.replace(name, "Mem0")}).memory()
    assert isinstance(reading, PressureUnknown)
    assert name in reading.reason


def test_no_meminfo_is_unknown(tmp_path):
    assert isinstance(PressureProbes.open(tmp_path, {}).memory(), PressureUnknown)


# PSI


def test_both_lines_are_read(tmp_path):
    reading = probes_of(tmp_path, {"proc/pressure/memory": PSI}).psi()
    assert reading == PsiReading(12.5, 4.25, 123456, 65432)


def test_missing_psi_names_the_boot_parameter(tmp_path):
    reading = PressureProbes.open(tmp_path, {}).psi()
    assert isinstance(reading, PressureUnknown)
    assert "psi=1" in reading.reason


def test_the_administrator_can_turn_stall_off(tmp_path):
    probes = probes_of(tmp_path, {"proc/pressure/memory": PSI}, {"MEMORY_PRESSURE_WATCH": "/dev/null"})
    reading = probes.psi()
    assert isinstance(reading, PressureUnknown)
    assert "MEMORY_PRESSURE_WATCH" in reading.reason


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_a_reading_or_a_probe_error(text):
    """Any other exception fails the test."""
    for parse in (parse_psi, parse_meminfo):
        with contextlib.suppress(ProbeError):
            parse(text)


def test_a_probe_reads_no_more_than_its_bound(tmp_path):
    (tmp_path / "huge").write_bytes(b"x" * 65537)
    with pytest.raises(ProbeError, match="longer"):
        read_probe(tmp_path / "huge")


# Control groups


def test_version_2_takes_the_lower_of_max_and_high(tmp_path):
    files = {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": MOUNT_V2}
    stat = "inactive_file 3000\nactive_file 2000\nfile_dirty 500\nfile_writeback 100\nshmem 9999\n"
    files |= v2_group("app", current=50000, limit=100000, high=80000, stat=stat)
    reading = probes_of(tmp_path, files).cgroup_memory()
    assert reading.limit_bytes == 80000
    assert reading.usage_bytes == 50000
    assert reading.reclaimable_bytes == 3000 + 2000 - 600


def test_a_group_without_a_limit_says_so(tmp_path):
    files = {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": MOUNT_V2}
    reading = probes_of(tmp_path, files | v2_group("app", current=1000)).cgroup_memory()
    assert reading.limit_bytes is None
    assert reading.usage_bytes == 1000


def test_a_limit_further_up_is_ours_too(tmp_path):
    files = {"proc/self/cgroup": "0::/slice/app\n", "proc/self/mountinfo": MOUNT_V2}
    files |= v2_group("slice/app", current=1000, limit=9000)
    files |= v2_group("slice", current=7500, limit=8000)
    reading = probes_of(tmp_path, files).cgroup_memory()
    assert reading.group.endswith("/slice")
    assert reading.limit_bytes - reading.usage_bytes == 500


def test_version_1_compares_usage_with_its_limit(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/app\n1:cpu:/\n0::/\n", "proc/self/mountinfo": MOUNTS_V1}
    stat = "inactive_file 1\ntotal_inactive_file 4000\ntotal_active_file 100\ntotal_dirty 600\n"
    files |= v1_group("app", usage=60000, limit=90000, stat=stat)
    files |= v1_group("", usage=99999, limit=9223372036854771712)
    reading = probes_of(tmp_path, files).cgroup_memory()
    assert (reading.usage_bytes, reading.limit_bytes, reading.reclaimable_bytes) == (60000, 90000, 3500)


def test_version_1_unlimited(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/app\n0::/\n", "proc/self/mountinfo": MOUNTS_V1}
    files |= v1_group("app", usage=60000, limit=9223372036854771712)
    assert probes_of(tmp_path, files).cgroup_memory().limit_bytes is None


def test_a_container_sees_only_its_part_of_the_hierarchy(tmp_path):
    mount = MOUNT_V2.replace("0:26 / /sys", "0:26 /docker/abc /sys")
    files = {"proc/self/cgroup": "0::/docker/abc/app\n", "proc/self/mountinfo": mount}
    files |= v2_group("app", current=1000, limit=5000)
    assert probes_of(tmp_path, files).cgroup_memory().limit_bytes == 5000


def test_a_path_out_of_sight_means_the_mount_itself(tmp_path):
    files = {"proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": MOUNT_V2}
    files |= v2_group("", current=1000, limit=5000)
    assert probes_of(tmp_path, files).cgroup_memory().limit_bytes == 5000


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "1:cpu:/\n", "proc/self/mountinfo": MOUNT_V2},
        {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": ""},
        {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": MOUNT_V2},
    ],
    ids=["no proc", "no memory controller", "not mounted", "no files"],
)
def test_no_group_is_unknown_never_zero(tmp_path, files):
    assert isinstance(probes_of(tmp_path, files).cgroup_memory(), PressureUnknown)


def test_garbage_in_a_group_is_unknown(tmp_path):
    files = {"proc/self/cgroup": "0::/app\n", "proc/self/mountinfo": MOUNT_V2}
    files |= v2_group("app", current="-5", limit=100)
    reading = probes_of(tmp_path, files).cgroup_memory()
    assert isinstance(reading, PressureUnknown)
    assert "memory.current" in reading.reason


def test_figures_are_read_afresh(tmp_path):
    probes = probes_of(tmp_path, {"proc/meminfo": MEMINFO})
    before = probes.memory()
    write_tree(tmp_path, {"proc/meminfo": MEMINFO.replace("5000000", "4000000")})
    assert before.available_bytes - probes.memory().available_bytes == 1_000_000 * 1024
