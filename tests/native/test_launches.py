"""A row of launches, with the driver's function played by the test: its calls, and how the row ends."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from array import array
from ctypes import POINTER, c_int32, c_size_t, c_uint32, c_void_p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

QUEUE = 0x5150
KERNEL_MAX = 2**64 - 1

Enqueue = ctypes.CFUNCTYPE(
    c_int32, c_void_p, c_void_p, c_uint32, *[POINTER(c_size_t)] * 3, c_uint32, c_void_p, c_void_p
)


class Driver:
    """Notes every call; from call number `refuses_at` on the answer is -54."""

    def __init__(self, refuses_at=None):
        self.calls = []
        self.refuses_at = refuses_at
        self.function = Enqueue(self.enqueue)
        self.address = ctypes.cast(self.function, c_void_p).value

    def enqueue(self, queue, kernel, dimensions, offset, sizes, local, num_events, events, event):
        if len(self.calls) == self.refuses_at:
            return -54
        local_size = local[:dimensions] if local else None
        self.calls.append((queue, kernel, sizes[:dimensions], local_size))
        assert not offset
        assert (num_events, events, event) == (0, None, None)
        return 0


sizes = st.integers(1, 2**40)
launches = st.integers(1, 3).flatmap(
    lambda dimensions: st.tuples(
        st.integers(1, KERNEL_MAX),
        st.lists(sizes, min_size=dimensions, max_size=dimensions),
        st.none() | st.lists(sizes, min_size=dimensions, max_size=dimensions),
    )
)


def words_of(row):
    words = array("Q")
    for kernel, global_size, local_size in row:
        unused = [0] * (3 - len(global_size))
        words.extend([kernel, len(global_size), *global_size, *unused])
        words.extend([0] * 3 if local_size is None else [*local_size, *unused])
    return words


@pytest.fixture(scope="module")
def enqueue_launches():
    """Both sides as one function, which checks that they agree."""
    native = pytest.importorskip("mzd._native")
    from mzd.native import launches_ctypes

    def both(make_driver, words):
        drivers = make_driver(), make_driver()
        results = [
            module.enqueue_launches(driver.address, QUEUE, words)
            for module, driver in zip((native, launches_ctypes), drivers, strict=True)
        ]
        assert results[0] == results[1]
        assert drivers[0].calls == drivers[1].calls
        return results[0], drivers[0].calls

    return both


@given(row=st.lists(launches, max_size=12), refuses_at=st.none() | st.integers(0, 12))
def test_every_launch_in_order_up_to_the_first_that_is_refused(enqueue_launches, row, refuses_at):
    (num_enqueued, status), calls = enqueue_launches(lambda: Driver(refuses_at), words_of(row))
    taken = row if refuses_at is None else row[:refuses_at]
    assert calls == [(QUEUE, *launch) for launch in taken]
    assert num_enqueued == len(taken)
    assert status == (0 if len(taken) == len(row) else -54)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (np.ones(7, np.uint64), "launches has 7 words, no multiple of 8"),
        (np.ones(8, np.uint32), "launches must be a one-dimensional array of uint64"),
        (np.array([1, 1, 1, 0, 0, 0, 0, 0, 1, 4, 0, 0, 0, 0, 0, 0], np.uint64), "launch 1 has 4 dimensions"),
        (np.array([1, 0, 1, 0, 0, 0, 0, 0], np.uint64), "launch 0 has 0 dimensions"),
    ],
)
def test_what_is_no_row_of_launches_is_refused_whole(backend, words, message):
    driver = Driver()
    with pytest.raises(ValueError, match=message):
        backend.enqueue_launches(driver.address, QUEUE, words)
    assert not driver.calls


def test_the_function_may_not_be_null(backend):
    with pytest.raises(ValueError, match="function is a null address"):
        backend.enqueue_launches(0, QUEUE, array("Q"))


def test_the_gil_is_free_meanwhile(backend):
    """`read` as the driver's function: it waits for a byte that another thread of Python writes."""
    reader, writer = os.pipe()
    byte = ctypes.create_string_buffer(1)
    read = ctypes.cast(ctypes.CDLL(None).read, c_void_p).value
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)  # ends the `read` of a call that holds the GIL, with -1
    thread = threading.Thread(target=os.write, args=(writer, b"x"))
    try:
        started = threading.Timer(0.05, thread.start)  # when the call below waits already
        started.start()
        one_byte = array("Q", [ctypes.addressof(byte), 1, 1, 0, 0, 0, 0, 0])
        assert backend.enqueue_launches(read, reader, one_byte) == (0, 1)
        assert byte.raw == b"x"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        started.join()
        thread.join()
        os.close(reader)
        os.close(writer)
