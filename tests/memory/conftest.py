"""Real memory to test on: anonymous mappings and what the kernel says is resident in them."""

import ctypes
import mmap
import os

import numpy as np
import pytest

PRESENT = np.uint64(1 << 63)


class AnonymousReservation:
    """Address space as a device on host memory gives it: mapped, untouched, not aligned to 2 MiB."""

    def __init__(self, size_bytes, skew_bytes=0):
        self._mapping = mmap.mmap(-1, size_bytes + skew_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping)) + skew_bytes
        self.size_bytes = size_bytes

    def free(self):
        self._mapping.close()


def count_resident_bytes(address, size_bytes):
    """Bytes of ``[address, address + size_bytes)`` that have a page, from /proc/self/pagemap."""
    first, last = address // mmap.PAGESIZE, -(-(address + size_bytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = np.frombuffer(os.pread(pagemap.fileno(), (last - first) * 8, first * 8), dtype=np.uint64)
    return int(np.count_nonzero(entries & PRESENT)) * mmap.PAGESIZE


def count_huge_bytes(address, size_bytes):
    """Bytes of the mappings inside the range that lie in huge pages, from /proc/self/smaps."""
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            field = line.split()
            if "-" in field[0] and not field[0].endswith(":"):
                low, high = (int(part, 16) for part in field[0].split("-"))
                inside = low < address + size_bytes and address < high
            elif inside and field[0] == "AnonHugePages:":
                total += int(field[1]) * 1024
    return total


@pytest.fixture
def resident_bytes():
    return count_resident_bytes


@pytest.fixture
def huge_bytes():
    return count_huge_bytes


@pytest.fixture
def locked_bytes():
    """A function that tells how much of this process is locked in memory (VmLck)."""

    def read():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmLck:"))

    return read


@pytest.fixture
def reserve():
    """A function that reserves anonymous address space; everything is unmapped after the test."""
    made = []

    def reserve_anonymous(size_bytes):
        made.append(AnonymousReservation(size_bytes, skew_bytes=64))
        return made[-1]

    yield reserve_anonymous
    for reservation in made:
        reservation.free()
