"""What the kernel says, from fake and from real /proc."""

import mmap

import pytest

from mzd.errors import MzdError
from mzd.memory.process_memory import read_process_memory

ROLLUP = "55d0-7ffe ---p 00000000 00:00 0 [rollup]\nRss:              123 kB\nPss:               99 kB\n"


def test_rollup_is_preferred(tmp_path):
    (tmp_path / "smaps_rollup").write_text(ROLLUP)
    (tmp_path / "statm").write_text("1 2 3 4 5 6 7\n")
    memory = read_process_memory(tmp_path)
    assert (memory.rss_bytes, memory.source) == (123 * 1024, "smaps_rollup")


@pytest.mark.parametrize("rollup", [None, "", "Rss: kB\n", "Pss: 4 kB\n"])
def test_statm_stands_in(tmp_path, rollup):
    if rollup is not None:
        (tmp_path / "smaps_rollup").write_text(rollup)
    (tmp_path / "statm").write_text("100 20 3 4 5 6 7\n")
    memory = read_process_memory(tmp_path)
    assert (memory.rss_bytes, memory.source) == (20 * mmap.PAGESIZE, "statm")


def test_an_unreadable_probe_is_an_error_and_not_zero(tmp_path):
    (tmp_path / "statm").write_text("garbage")
    with pytest.raises(MzdError, match="cannot be read"):
        read_process_memory(tmp_path)


def test_the_real_figure_follows_the_resident_set():
    before = read_process_memory().rss_bytes
    block = mmap.mmap(-1, 32 << 20)
    block.write(b"\1" * (32 << 20))
    after = read_process_memory().rss_bytes
    block.close()
    assert after - before >= 31 << 20  # the kernel may take other pages meanwhile
