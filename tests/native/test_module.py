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


def saw_effect(call, has_effect) -> bool:
    """Whether this thread, which does not let go of the GIL, saw the effect of `call` in another come about.

    With no forced switch, the other thread can only get on with its work if it does so without the GIL.
    """
    started = threading.Event()

    def work():
        started.set()
        call()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    was_before = not has_effect()
    was_seen = was_before and any(has_effect() for _ in range(1_000_000))
    thread.join()
    return was_seen


def u64(*values):
    return np.array(values, np.uint64)


SIZE = 32 * 1024 * 1024


@pytest.mark.parametrize("name", ["fill", "copy", "encode", "decode", "read_extents"])
def test_long_work_drops_the_gil(name, tmp_path):
    module = pytest.importorskip("mzd._native")
    source, target = np.ones(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    src, dst = source.ctypes.data, target.ctypes.data
    path = tmp_path / "ones"
    path.write_bytes(source.data if name == "read_extents" else b"")
    with path.open("rb") as file:
        calls = {
            "fill": lambda: module.fill(dst, SIZE, 1),
            "copy": lambda: module.copy(dst, src, SIZE),
            "encode": lambda: module.int8_encode_batch(u64(src), u64(dst), SIZE // 2, np.empty(1, np.uint8)),
            "decode": lambda: module.int8_decode_batch(u64(src), u64(dst), SIZE // 2),
            "read_extents": lambda: module.read_extents(file.fileno(), u64(0), u64(dst), u64(SIZE)),
        }
        assert was_seen_at_work(calls[name], target)


def was_seen_at_work(call, target) -> bool:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        for _ in range(20):  # the scheduler may let a whole call pass before this thread wakes
            target[:] = 0
            if saw_effect(call, lambda: target[SIZE // 2] != 0):  # a payload is just longer than this
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
