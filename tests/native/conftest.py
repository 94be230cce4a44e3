"""Both sides of `mzd.native`, and memory with an address."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from mzd import native
from mzd.native import crc32c_numpy, extents_python, int8_numpy, launches_ctypes, pages_ctypes

STAND_INS = (int8_numpy, crc32c_numpy, extents_python, pages_ctypes, launches_ctypes)


def numpy_backend() -> SimpleNamespace:
    names = set(native.__all__) - {"BACKEND", "FALLBACK_REASON"}
    found = {name: getattr(module, name) for module in STAND_INS for name in names & vars(module).keys()}
    assert found.keys() == names
    return SimpleNamespace(**found)


@pytest.fixture(params=["c", "numpy"])
def backend(request):
    """The functions of `mzd.native`, once from the extension and once from its stand-in."""
    if request.param == "numpy":
        return numpy_backend()
    return pytest.importorskip("mzd._native")


class Memory:
    """Private anonymous pages."""

    def __init__(self, size: int, *, alignment: int = mmap.PAGESIZE) -> None:
        self._map = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // alignment) * alignment
        self.bytes = np.frombuffer(self._map, np.uint8)[self.address - start :][:size]


@pytest.fixture
def memory():
    """Make memory: `memory(size, alignment=page)`."""
    return Memory
