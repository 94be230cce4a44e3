"""The measurement of a device: what it counts, what it leaves, and what happens where it cannot be made."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import logging
import math
import mmap
import os
import threading
from dataclasses import asdict, astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from mzd.cli.main import main
from mzd.codec import codec_by_name
from mzd.daemon import profiling, profiling_steps
from mzd.daemon.config import Config, ThreadsConfig
from mzd.daemon.device_choice import ChosenDevice
from mzd.daemon.profiling import Subject, WeightsFile, load_or_measure, measure, measure_and_keep
from mzd.daemon.profiling_steps import (
    MEMORY_BYTES_MAX,
    TRANSFER_BYTES,
    decoders,
    mapped_area,
    piece_file,
    rates,
    readers,
    time_pages,
    writers,
)
from mzd.errors import MzdError
from mzd.memory.device_profile_store import PROFILE_FILE, MeasuredProfile
from mzd.memory.workers import Workers
from mzd.policy.profile import DEFAULT_PROFILE

THREADS = ThreadsConfig(read=2, decompress=2)
PIECE = 4 * 1024 * 1024
PROFILE = MeasuredProfile(
    decode_bytes_per_s=8e9,
    read_bytes_per_s=2e9,
    write_bytes_per_s=5e8,
    populate_s_per_mb=1.5e-4,
    read_alone_bytes_per_s=2.5e9,
    release_s_per_mb=4e-6,
)


@pytest.fixture
def quick(monkeypatch):
    """Rounds just long enough for one step of each thread."""
    for name in ("_WRITE_S", "_READ_S", "_BOTH_S"):
        monkeypatch.setattr(profiling, name, 1e-3)


@pytest.fixture
def subject(tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    return Subject("a GPU", "driver 1", codec_by_name("int8"), THREADS, True, state, None)


@pytest.fixture
def weights(tmp_path):
    """A file of 20 MiB and 1 page, every page of which tells its number."""
    path = tmp_path / "weights.mzw"
    pages = np.zeros((TRANSFER_BYTES // 4 * 5 // 4096 + 1, 1024), np.uint32)
    pages[:, 0] = np.arange(len(pages))
    path.write_bytes(pages.tobytes())
    fd = os.open(path, os.O_RDONLY)
    yield WeightsFile(path, fd, direct=False)
    os.close(fd)


def page_numbers(address, size_bytes):
    """The first words of the pages in memory."""
    return bytes_at(address, size_bytes).view(np.uint32)[::1024]


def bytes_at(address, size_bytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def mapped_bytes():
    """Address space of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * mmap.PAGESIZE


# The whole of it.


@pytest.mark.parametrize("codec", ["int8", "none"])
@pytest.mark.parametrize("huge_pages", [False, True])
async def test_a_measurement_gives_figures_and_leaves_nothing(subject, quick, codec, huge_pages):
    subject = replace(subject, codec=codec_by_name(codec), huge_pages=huge_pages)
    open_before = os.listdir("/proc/self/fd")
    profile = await measure(subject)
    figures = astuple(profile)
    assert all(math.isfinite(figure) and figure > 0 for figure in figures if isinstance(figure, float))
    assert profile.source == "measured"
    assert os.listdir(subject.state) == []
    assert os.listdir("/proc/self/fd") == open_before


async def test_the_file_never_has_a_name(subject, quick, monkeypatch):
    seen = []
    monkeypatch.setattr(
        profiling, "writers", lambda *args: seen.append(os.listdir(subject.state)) or writers(*args)
    )
    await measure(subject)
    assert seen == [[]]


async def start_threads(count):
    """Have so many threads work at once: their stacks and heaps are mapped from here on."""
    together = threading.Barrier(count, timeout=60)

    def work():
        together.wait()
        bytearray(50_000)

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(trio.to_thread.run_sync, work)


async def test_memory_is_bounded_and_unmapped(subject, quick, monkeypatch):
    await start_threads(THREADS.read + THREADS.decompress)
    await measure(subject)
    before, seen = mapped_bytes(), []
    monkeypatch.setattr(
        profiling, "readers", lambda *args: seen.append(mapped_bytes() - before) or readers(*args)
    )
    await measure(subject)
    assert 0 < seen[0] <= MEMORY_BYTES_MAX + 1024 * 1024
    assert mapped_bytes() - before < 1024 * 1024


async def test_reads_come_from_the_weights_unless_these_are_tiny(subject, weights, quick, monkeypatch):
    files = []
    monkeypatch.setattr(
        profiling, "readers", lambda file, *args: files.append(file.fd) or readers(file, *args)
    )
    await measure(replace(subject, weights=weights))
    os.truncate(weights.path, TRANSFER_BYTES - 1)
    await measure(replace(subject, weights=weights))
    assert (files[0] == weights.fd, files[1] == weights.fd) == (True, False)


async def test_decoding_and_reads_run_side_by_side(subject, quick, monkeypatch):
    """Each waits for the other inside its first step of a round: only together do they get on."""
    together = threading.Barrier(THREADS.read + THREADS.decompress, timeout=60)

    def meet():
        together.wait()
        return 1

    rounds = []

    async def meeting_rates(kinds, seconds):
        if len(kinds) == 2:
            rounds.append([workers.name for workers, _ in kinds])
            kinds = [(workers, [meet] * len(steps)) for workers, steps in kinds]
            return await rates(kinds, 0.0)
        return await rates(kinds, seconds)

    monkeypatch.setattr(profiling, "rates", meeting_rates)
    await measure(subject)
    assert rounds == [["decompress", "read"]] * 3


async def test_each_figure_is_in_its_place_and_rounds_give_their_median(subject, weights, monkeypatch):
    answers = iter([[7.0], [5.0], [1.0, 30.0], [9.0, 10.0], [2.0, 20.0]])

    async def known_rates(_kinds, _seconds):
        return next(answers)

    monkeypatch.setattr(profiling, "rates", known_rates)
    monkeypatch.setattr(profiling, "time_pages", lambda *_: (0.1, 0.2))
    assert await measure(replace(subject, weights=weights)) == MeasuredProfile(
        decode_bytes_per_s=2.0,
        read_bytes_per_s=20.0,
        write_bytes_per_s=7.0,
        populate_s_per_mb=0.1,
        read_alone_bytes_per_s=5.0,
        release_s_per_mb=0.2,
    )


# Steps.


def test_decoders_share_all_chunks_and_decode_them():
    codec, decoded = codec_by_name("int8"), []
    with mapped_area() as area:
        time_pages(area, False)
        counting = SimpleNamespace(
            name=codec.name,
            payload_bytes=codec.payload_bytes,
            encode_batch=codec.encode_batch,
            decode_batch=lambda sources, targets, size: (
                decoded.append((sources, targets, size)) or codec.decode_batch(sources, targets, size)
            ),
        )
        steps = decoders(counting, area, 3)
        total = sum(step() for step in steps for _ in range(20))
        targets = np.unique(np.concatenate([targets for _, targets, _ in decoded]))
        chunk_bytes = decoded[0][2]
        assert total == sum(len(targets) for _, targets, _ in decoded) * chunk_bytes
        assert max(len(targets) for _, targets, _ in decoded) * chunk_bytes <= PIECE
        assert (np.diff(targets) >= chunk_bytes).all()
        assert area.codec_address <= targets[0]
        assert targets[-1] + chunk_bytes <= area.transfer_address + MEMORY_BYTES_MAX - 2 * 1024 * 1024
        first, last = (bytes_at(int(t), chunk_bytes).view(np.float16) for t in targets[[0, -1]])
        np.testing.assert_array_equal(first, last)
        assert 0.9 < first.astype(np.float32).std() < 1.1


@pytest.mark.parametrize("threads", [1, 2, 5, 64, 1000])
def test_every_thread_has_memory_of_its_own(threads, weights):
    with mapped_area() as area:
        file = piece_file(weights.fd, False, TRANSFER_BYTES, threads)
        steps = readers(file, area, threads)
        assert len(steps) == min(threads, 64)
        assert file.piece_bytes % 4096 == 0
        assert 0 < file.piece_bytes <= PIECE
        assert len(steps) * file.piece_bytes <= TRANSFER_BYTES
        assert len(decoders(codec_by_name("none"), area, threads)) == min(threads, 64)


def test_readers_go_through_the_file_front_to_back_and_around(weights):
    size_bytes = os.fstat(weights.fd).st_size
    with mapped_area() as area:
        steps = readers(piece_file(weights.fd, False, size_bytes, 2), area, 2)
        starts = []
        for i in range(7):
            assert steps[i % 2]() == PIECE
            pages = page_numbers(area.transfer_address + i % 2 * PIECE, PIECE)
            assert (np.diff(pages.astype(np.int64)) == 1).all()
            starts.append(int(pages[0]) * 4096 // PIECE)
    assert starts == [0, 1, 2, 3, 4, 0, 1]  # the page behind the last whole piece is left out


def test_writers_stop_when_all_is_written(tmp_path):
    fd = os.open(tmp_path / "written", os.O_RDWR | os.O_CREAT)
    with mapped_area() as area:
        steps = writers(piece_file(fd, False, 3 * PIECE, 2), area, 2)
        assert [steps[i % 2]() for i in range(5)] == [PIECE, PIECE, PIECE, 0, 0]
    assert os.fstat(fd).st_size == 3 * PIECE
    os.close(fd)


async def test_rates_add_the_threads_of_a_kind(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(profiling_steps.time, "perf_counter", lambda: float(next(ticks)))
    workers = Workers("test", 1)  # one after the other, so that the clock is theirs
    found = await rates([(workers, [lambda: 6]), (workers, [lambda: 10, lambda: 10])], 0.0)
    # A step ends after two ticks: at its start, and when it looks whether the deadline has come.
    assert found == [3.0, 10.0]


async def test_a_failing_step_is_raised_when_the_others_have_ended():
    ended = threading.Event()

    def fail():
        raise OSError(errno.EIO, "broken")

    def slow():
        ended.wait(0.05)
        ended.set()
        return 0

    workers = Workers("test", 2)
    with pytest.raises(OSError, match="broken"):
        await rates([(workers, [fail, slow])], 0.0)
    assert ended.is_set()


# Kept, and where it fails.


async def test_the_first_start_measures_and_later_ones_load(subject, quick, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    first = await load_or_measure(subject)
    assert [record.message.startswith("profile: measured") for record in caplog.records] == [True]
    monkeypatch.setattr(profiling, "measure", None)
    assert await load_or_measure(subject) == first
    assert len(caplog.records) == 1
    assert os.listdir(subject.state) == [PROFILE_FILE]


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another GPU"},
        {"driver": "driver 2"},
        {"codec": codec_by_name("none")},
        {"threads": replace(THREADS, decompress=1)},
        {"threads": replace(THREADS, cores=(0,))},
        {"huge_pages": False},
    ],
)
async def test_another_subject_is_measured_anew(subject, monkeypatch, change):
    measured = []

    async def fake_measure(asked):
        measured.append(asked)
        return PROFILE

    monkeypatch.setattr(profiling, "measure", fake_measure)
    changed = replace(subject, **change)
    for asked in (subject, changed, subject, changed):
        assert await load_or_measure(asked) == PROFILE
    assert measured == [subject, changed]


async def test_a_damaged_file_is_measured_over(subject, quick):
    await load_or_measure(subject)
    path = subject.state / PROFILE_FILE
    path.write_bytes(path.read_bytes()[:-10])
    measured = await load_or_measure(subject)
    assert measured.source == "measured"
    assert await load_or_measure(subject) == measured


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "no memory"), MzdError("internal", "no codec"), MemoryError("none")]
)
async def test_a_device_that_cannot_be_measured_has_the_default(subject, monkeypatch, caplog, error):
    async def fail(_subject):
        raise error

    monkeypatch.setattr(profiling, "measure", fail)
    assert await load_or_measure(subject) is DEFAULT_PROFILE
    assert "the default serves" in caplog.text
    assert str(error) in caplog.text
    assert os.listdir(subject.state) == []


async def test_a_state_directory_that_is_gone_gives_the_default(subject, caplog):
    subject.state.rmdir()
    assert await load_or_measure(subject) is DEFAULT_PROFILE
    assert "the default serves" in caplog.text


@pytest.mark.parametrize("kind", ["eio", "enospc"])
async def test_a_broken_disk_gives_the_default_and_no_trace(subject, quick, caplog, kind):
    extension = pytest.importorskip("mzd._native")
    extension._set_io_fault(1, kind)
    try:
        assert await load_or_measure(subject) is DEFAULT_PROFILE
    finally:
        extension._set_io_fault(0, "none")
    assert f"writing: {os.strerror(getattr(errno, kind.upper()))}" in caplog.text
    assert os.listdir(subject.state) == []


async def test_no_memory_gives_the_default(subject, monkeypatch, caplog):
    monkeypatch.setattr(profiling_steps.native, "populate", lambda *_: -errno.ENOMEM)
    assert await load_or_measure(subject) is DEFAULT_PROFILE
    assert "memory: Cannot allocate memory" in caplog.text


async def test_a_profile_that_cannot_be_kept_is_used(subject, monkeypatch, caplog):
    async def fake_measure(_subject):
        return PROFILE

    monkeypatch.setattr(profiling, "measure", fake_measure)
    (subject.state / PROFILE_FILE).mkdir()
    assert await measure_and_keep(subject) == PROFILE
    assert "profile: not kept" in caplog.text


# Without a daemon.


class FakeDevice:
    name, driver = "a GPU", "driver 1"
    is_closed = False

    def close(self):
        FakeDevice.is_closed = True


@pytest.fixture
def fake_device(monkeypatch):
    """A device that any configuration would take."""
    monkeypatch.setattr(profiling, "choose_device", lambda *_: ChosenDevice(FakeDevice(), refusals=()))


def test_the_command_measures_without_a_daemon_and_keeps(tmp_path, monkeypatch, quick, fake_device):
    monkeypatch.setenv("MZD_HOME", str(tmp_path / "home"))
    config = Config(state=str(tmp_path / "deep" / "state"), model="none")
    first = profiling.profile_anew(config)
    second = profiling.profile_anew(config)
    assert first != second  # measured, not loaded
    assert FakeDevice.is_closed
    kept = tmp_path / "deep" / "state"
    assert os.listdir(kept) == [PROFILE_FILE]
    assert kept.stat().st_mode & 0o777 == 0o700


def test_the_command_says_why_it_cannot(tmp_path, monkeypatch, quick, fake_device):
    monkeypatch.setenv("MZD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiling_steps.native, "populate", lambda *_: -errno.ENOMEM)
    with pytest.raises(MzdError, match="Cannot allocate memory") as error:
        profiling.profile_anew(Config(state=str(tmp_path), model="none"))
    assert error.value.code == "internal"


def test_the_command_line_measures_what_its_flags_say(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(profiling, "profile_anew", lambda config: asked.append(config) or PROFILE)
    path = tmp_path / "mzd.toml"
    path.write_text('device = "of the file"\n[threads]\ndecompress = 3\n')
    line = ["profile", "--measure", "--config", str(path), "--state", "x", "--codec", "none", "--json"]
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out) == {"profile": asdict(PROFILE)}
    assert (asked[0].state, asked[0].codec, asked[0].device) == ("x", "none", "of the file")
    assert asked[0].threads.decompress == 3
