"""Page work: what populate brings in, what release gives back, and whose pages are left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

HUGE = 2 * 1024 * 1024


def kernel_version():
    return tuple(int(number) for number in os.uname().release.split(".")[:2])


def mapping_of(address):
    """The lines of /proc/self/smaps for the mapping that holds an address, as a dict of words."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            if found is not None:
                break
            found = {} if start <= address < end else None
        elif found is not None:
            found[first.rstrip(":")] = rest
    return found


def test_populate_makes_resident_and_release_gives_back(backend, memory):
    page = backend.PAGE_BYTES
    area = memory(64 * page)
    assert backend.resident_bytes(area.address, 64 * page) == 0
    assert backend.populate(area.address + page, 32 * page, False) == 0
    assert backend.resident_bytes(area.address, 64 * page) == 32 * page
    area.bytes[:] = 7
    assert backend.release(area.address + page, 62 * page) == 0
    assert backend.resident_bytes(area.address, 64 * page) == 2 * page
    assert (area.bytes[:page] == 7).all()
    assert (area.bytes[-page:] == 7).all()
    assert not area.bytes[page:-page].any()


def test_populate_keeps_what_is_there(backend, memory):
    area = memory(8 * backend.PAGE_BYTES)
    area.bytes[: 4 * backend.PAGE_BYTES] = 9
    assert backend.populate(area.address, area.bytes.size, True) == 0
    assert (area.bytes[: 4 * backend.PAGE_BYTES] == 9).all()
    assert not area.bytes[4 * backend.PAGE_BYTES :].any()


def test_huge_pages_where_whole_ones_fit_and_khugepaged_kept_away(backend, memory):
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("no huge pages on this kernel")
    area = memory(6 * HUGE, alignment=HUGE)
    assert backend.populate(area.address + HUGE // 2, 4 * HUGE, True) == 0
    mapping = mapping_of(area.address + 2 * HUGE)
    assert "nh" in mapping["VmFlags"]
    huge_bytes = int(mapping["AnonHugePages"][0]) * 1024
    assert huge_bytes in range(0, 4 * HUGE, HUGE)  # fewer than 3 where memory is too fragmented
    assert backend.resident_bytes(area.address, 6 * HUGE) == 4 * HUGE
    assert backend.release(area.address, 6 * HUGE) == 0
    assert backend.resident_bytes(area.address, 6 * HUGE) == 0


def test_locked_pages_can_be_released(backend, memory):
    area = memory(4 * backend.PAGE_BYTES)
    if backend.lock(area.address, area.bytes.size) != 0:
        pytest.skip("the limit on locked memory is below four pages")
    assert backend.resident_bytes(area.address, area.bytes.size) == area.bytes.size
    assert backend.release(area.address, area.bytes.size) == 0
    assert backend.resident_bytes(area.address, area.bytes.size) == 0
    if "lo" not in mapping_of(area.address)["VmFlags"]:
        assert kernel_version() < (5, 18)  # later kernels keep the lock for pages that come back
    assert backend.unlock(area.address, area.bytes.size) == 0


def test_ranges_that_are_not_mapped_are_an_error_and_no_crash(backend):
    page = backend.PAGE_BYTES
    assert backend.populate(page, page, False) in (-errno.ENOMEM, -errno.EFAULT)
    assert backend.release(page, page) == -errno.ENOMEM
    assert backend.lock(page, page) in (-errno.ENOMEM, -errno.EPERM)
    with pytest.raises(ValueError, match="mincore"):
        backend.resident_bytes(page, page)


@pytest.mark.parametrize("call", ["release", "lock", "unlock", "resident_bytes"])
@pytest.mark.parametrize(
    ("shift", "extra", "message"),
    [
        (1, 0, "is not a multiple of"),
        (0, 1, "multiple of the page size"),
        (-4096, 2**64 - 4096, "wrap around"),
    ],
)
def test_what_is_not_on_pages_is_refused(backend, memory, call, shift, extra, message):
    area = memory(4 * backend.PAGE_BYTES)
    address, size = (area.address + shift, 4096 + extra) if extra < 2 else (extra, 4096)
    if backend.PAGE_BYTES != 4096:
        pytest.skip("numbers are for 4 KiB pages")
    with pytest.raises(ValueError, match=message):
        getattr(backend, call)(address, size)
    with pytest.raises(ValueError, match=message):
        backend.populate(address, size, False)


def test_nothing_is_done_to_no_pages(backend):
    assert backend.populate(4096, 0, True) == backend.release(4096, 0) == 0
    assert backend.resident_bytes(4096, 0) == 0


def test_fill_and_copy(backend):
    data = np.arange(100, dtype=np.uint8)
    address = data.ctypes.data
    backend.fill(address + 10, 5, 255)
    assert data[8:17].tolist() == [8, 9, 255, 255, 255, 255, 255, 15, 16]
    backend.copy(address + 1, address, 50)  # overlapping
    assert data[:12].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 255]
    with pytest.raises(ValueError, match="256"):
        backend.fill(address, 1, 256)
    with pytest.raises(ValueError, match="src is a null address"):
        backend.copy(address, 0, 1)


def test_heap_calls_say_whether_they_exist(backend):
    assert backend.trim_heap() == backend.set_mmap_threshold(1024 * 1024)
    with pytest.raises(ValueError, match="2147483648"):
        backend.set_mmap_threshold(2**31)
