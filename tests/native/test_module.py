"""The choice between extension and stand-in, and that work drops the GIL."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading

import numpy as np
import pytest

from mzd import native

WITHOUT_EXTENSION = """
import sys
sys.modules["mzd._native"] = None
from mzd import native
from mzd.codec import codec_by_name
assert native.BACKEND == "numpy" and native.FALLBACK_REASON, native.BACKEND
assert native.crc32c_buffer(b"123456789") == 0xE3069283
assert codec_by_name("int8").payload_bytes(64) == 34
for name in native.__all__:
    getattr(native, name)
"""


def test_without_the_extension_everything_is_there():
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_EXTENSION], check=True)


def test_the_extension_is_used_where_it_is_built():
    pytest.importorskip("mzd._native")
    assert native.BACKEND == "c"
    assert native.FALLBACK_REASON is None


def test_signatures_of_both_sides_agree(backend):
    functions = [name for name in native.__all__ if callable(getattr(native, name))]
    assert functions
    for name in functions:
        expected = list(inspect.signature(getattr(native, name)).parameters)
        assert list(inspect.signature(getattr(backend, name)).parameters) == expected


def ran_beside(call) -> bool:
    """Whether this thread ran while `call` was at work in another; with no forced switch it can only so."""
    started, is_done = threading.Event(), threading.Event()

    def work():
        started.set()
        call()
        is_done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    was_beside = not is_done.is_set()
    thread.join()
    return was_beside


def test_long_work_drops_the_gil():
    module = pytest.importorskip("mzd._native")
    data = np.zeros(64 * 1024 * 1024, np.uint8)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        calls = [
            lambda: module.crc32c_buffer(data, 0, "table"),
            lambda: module.fill(data.ctypes.data, data.size, 1),
        ]
        for call in calls:
            assert any(ran_beside(call) for _ in range(20))
        assert not any(ran_beside(lambda: sum(range(2_000_000))) for _ in range(3))
    finally:
        sys.setswitchinterval(interval)
