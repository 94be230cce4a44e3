"""Extent I/O: whole extents under every kind of bad luck, or a result that names it."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KIB = 1024


def u64(*values):
    return np.array(values, np.uint64)


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "extents", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@contextmanager
def io_fault(every_nth, kind):
    native = pytest.importorskip("mzd._native")
    native._set_io_fault(every_nth, kind)
    try:
        yield native
    finally:
        native._set_io_fault(0, "none")


def test_what_is_written_is_read_with_checksums_that_agree(backend, file):
    content, back = random_bytes(300 * KIB), np.zeros(300 * KIB, np.uint8)
    offsets, sizes = u64(4096, 200 * KIB, 900 * KIB), u64(100 * KIB, 1, 199 * KIB)
    starts = u64(0, 100 * KIB, 101 * KIB)
    written, read = np.empty(3, np.uint32), np.empty(3, np.uint32)
    seeds = np.array([1, 2, 3], np.uint32)
    writes = backend.write_extents(file, offsets, content.ctypes.data + starts, sizes, written, seeds)
    reads = backend.read_extents(file, offsets, back.ctypes.data + starts, sizes, read, seeds)
    assert writes == reads == [0, 0, 0]
    for start, size, crc, seed in zip(starts.tolist(), sizes.tolist(), read, seeds, strict=True):
        np.testing.assert_array_equal(back[start : start + size], content[start : start + size])
        assert crc == backend.crc32c_buffer(content[start : start + size], int(seed))
    np.testing.assert_array_equal(written, read)


def test_extents_of_many_pieces(backend, file):
    content = random_bytes(17 * KIB * KIB + 5)
    back, crc = np.zeros_like(content), np.empty(1, np.uint32)
    assert backend.write_extents(file, u64(3), u64(content.ctypes.data), u64(content.size)) == [0]
    assert backend.read_extents(file, u64(3), u64(back.ctypes.data), u64(back.size), crc) == [0]
    np.testing.assert_array_equal(back, content)
    assert crc[0] == backend.crc32c_buffer(content)


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
    direction=st.sampled_from([1, -1, 0]),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_neighbours_in_the_file_go_anywhere_in_memory(backend, file, sizes, gaps, order, direction):
    """In the file's order, against it, and in none."""
    lengths = u64(*sizes)
    offsets = np.concatenate([u64(0), np.cumsum(lengths + u64(*gaps[: len(sizes)]))[:-1]]).astype(np.uint64)
    places = list(range(len(sizes)))
    order.shuffle(places)
    turn = places if direction == 0 else range(len(sizes))[::direction]
    offsets, lengths = offsets[list(turn)], lengths[list(turn)]
    content, back = random_bytes(3000 * len(sizes), len(sizes)), np.zeros(3000 * len(sizes), np.uint8)
    starts = u64(*places) * np.uint64(3000)
    written, read = np.empty(len(sizes), np.uint32), np.empty(len(sizes), np.uint32)
    assert not any(backend.write_extents(file, offsets, content.ctypes.data + starts, lengths, written))
    assert not any(backend.read_extents(file, offsets, back.ctypes.data + starts, lengths, read))
    for start, length, crc in zip(starts.tolist(), lengths.tolist(), read.tolist(), strict=True):
        np.testing.assert_array_equal(back[start : start + length], content[start : start + length])
        assert crc == backend.crc32c_buffer(content[start : start + length])
    np.testing.assert_array_equal(written, read)


def test_one_bad_address_among_neighbours_is_that_extent_s_own(backend, file):
    os.pwrite(file, b"x" * 4 * 4096, 0)
    back = np.zeros((4, 4096), np.uint8)
    rows = back.ctypes.data + 4096 * np.arange(4, dtype=np.uint64)
    rows[1] = 1
    offsets, sizes = u64(0, 4096, 8192, 12288), u64(4096, 4096, 4096, 4096)
    assert backend.read_extents(file, offsets, rows, sizes) == [0, -errno.EFAULT, 0, 0]
    assert (back[[0, 2, 3]] == ord("x")).all()


def test_a_file_that_ends_early_is_short_and_the_others_are_read(backend, file):
    os.pwrite(file, b"x" * 10_000, 0)
    back = np.zeros((3, 8192), np.uint8)
    rows = back.ctypes.data + 8192 * np.arange(3, dtype=np.uint64)
    results = backend.read_extents(file, u64(0, 4096, 20_000), rows, u64(8192, 8192, 1))
    assert results == [0, backend.EXTENT_SHORT, backend.EXTENT_SHORT]
    assert (back[0] == ord("x")).all()


def test_a_short_direct_read_is_short_too(backend, tmp_path, memory):
    path = tmp_path / "direct"
    path.write_bytes(b"y" * 5000)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no direct I/O")
    target = memory(8192)
    assert backend.read_extents(fd, u64(0), u64(target.address), u64(8192)) == [backend.EXTENT_SHORT]
    os.close(fd)


def test_errors_of_the_kernel_come_back_as_minus_errno(backend, file, memory):
    hole = memory(4096)
    assert backend.read_extents(-1, u64(0), u64(hole.address), u64(16)) == [-errno.EBADF]
    os.pwrite(file, bytes(16), 0)
    assert backend.read_extents(file, u64(0), u64(1), u64(16)) == [-errno.EFAULT]  # page 0 is never mapped


def test_no_extents_and_empty_extents(backend, file):
    none = np.empty(0, np.uint64)
    assert backend.read_extents(file, none, none, none) == []
    crc = np.empty(1, np.uint32)
    assert backend.read_extents(file, u64(0), u64(0), u64(0), crc, np.array([9], np.uint32)) == [0]
    assert crc[0] == 9


@pytest.mark.parametrize("kind", ["short", "eintr"])
@given(every_nth=st.integers(2, 5), sizes=st.lists(st.integers(1, 70_000), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_short_and_interrupted_calls_are_continued(tmp_path_factory, kind, every_nth, sizes):
    lengths = u64(*sizes)
    starts = np.concatenate([u64(0), np.cumsum(lengths)[:-1]]).astype(np.uint64)
    content = random_bytes(sum(sizes), seed=every_nth)
    back, crcs = np.zeros_like(content), np.empty(len(sizes), np.uint32)
    fd = os.open(tmp_path_factory.mktemp("faults") / "extents", os.O_RDWR | os.O_CREAT)
    with io_fault(every_nth, kind) as native:
        assert native.write_extents(fd, starts, content.ctypes.data + starts, lengths) == [0] * len(sizes)
        assert native.read_extents(fd, starts, back.ctypes.data + starts, lengths, crcs) == [0] * len(sizes)
    os.close(fd)
    np.testing.assert_array_equal(back, content)
    expected = [native.crc32c_buffer(content[s : s + n]) for s, n in zip(starts, lengths, strict=True)]
    assert crcs.tolist() == expected


def test_every_call_short_still_ends(file):
    content, back = random_bytes(5000), np.zeros(5000, np.uint8)
    with io_fault(1, "short") as native:
        assert native.write_extents(file, u64(0), u64(content.ctypes.data), u64(5000)) == [0]
        assert native.read_extents(file, u64(0), u64(back.ctypes.data), u64(5000)) == [0]
    np.testing.assert_array_equal(back, content)


@pytest.mark.parametrize(("kind", "error"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
def test_a_failed_extent_does_not_stop_the_next(file, kind, error):
    content = random_bytes(3 * 100)
    places = u64(0, 100, 200)
    with io_fault(2, kind) as native:
        results = native.write_extents(file, places, content.ctypes.data + places, u64(100, 100, 100))
    assert results == [0, -error, 0]


def test_faults_that_do_not_exist_are_refused():
    native = pytest.importorskip("mzd._native")
    for every_nth, kind in ((1, "gremlin"), (0, "short")):
        with pytest.raises(ValueError, match="no fault"):
            native._set_io_fault(every_nth, kind)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offsets": u64(0, 1)}, "offsets has 2 items and addresses has 1"),
        ({"sizes": u64(1, 1)}, "offsets has 1 items and sizes has 2"),
        ({"crc_out": np.zeros(2, np.uint32)}, "offsets has 1 items and crc_out has 2"),
        ({"crc_out": np.zeros(1, np.uint64)}, "crc_out must be a one-dimensional array of uint32"),
        ({"seeds": np.zeros(1, np.uint32)}, "seeds without crc_out"),
        ({"offsets": u64(2**63)}, "end past any file"),
        ({"offsets": u64(2**63 - 8), "sizes": u64(9)}, "end past any file"),
        ({"addresses": u64(0)}, "addresses is a null address"),
        ({"addresses": u64(2**64 - 1)}, "wrap around"),
    ],
)
def test_arguments_that_cannot_be_are_refused(backend, file, arguments, message):
    good = {"offsets": u64(0), "addresses": u64(4096), "sizes": u64(8)}
    with pytest.raises(ValueError, match=message):
        backend.read_extents(file, **(good | arguments))


def test_a_read_only_result_array_is_refused(backend, file):
    crcs = np.zeros(1, np.uint32)
    crcs.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        backend.read_extents(file, u64(0), u64(mmap.PAGESIZE), u64(0), crcs)


def test_direct_io_reaches_memory_that_is_not_page_aligned(backend, tmp_path):
    """Drivers hand out such memory; the kernel then refuses the address, not the file."""
    content = random_bytes(8 * 4096, seed=3)
    path = tmp_path / "file"
    path.write_bytes(content.tobytes())
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    area = np.zeros(10 * 4096, np.uint8)
    address = -(-area.ctypes.data // 4096) * 4096 + 128
    start = address - area.ctypes.data
    try:
        crcs = np.zeros(1, np.uint32)
        assert list(backend.read_extents(fd, u64(0), u64(address), u64(8 * 4096), crcs)) == [0]
        assert np.array_equal(area[start : start + 8 * 4096], content)
        assert crcs[0] == backend.crc32c_buffer(content, 0)
        area[start : start + 4096] = 7
        assert list(backend.write_extents(fd, u64(4096), u64(address), u64(4096))) == [0]
    finally:
        os.close(fd)
    assert path.read_bytes()[4096:8192] == b"\7" * 4096
