"""Owns the pieces of work that a measurement repeats, the memory they use, and how they become rates."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from mzd import native
from mzd.codec import Codec
from mzd.errors import MzdError
from mzd.memory.huge_pages import forbid_huge_pages
from mzd.memory.workers import Workers
from mzd.policy.units import HUGE_PAGE_BYTES, PAGE_BYTES

MEMORY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Address space of a measurement; all of it becomes resident."""

TRANSFER_BYTES: Final = 16 * 1024 * 1024
"""Memory that reads and writes use, and what is written at the most."""

_CODEC_BYTES: Final = MEMORY_BYTES_MAX - TRANSFER_BYTES - HUGE_PAGE_BYTES
"""Payloads and what comes out of them: more than most caches hold, so that it goes through memory."""

_PIECE_BYTES_MAX: Final = 4 * 1024 * 1024
"""One transfer, one batch of chunks: as restoration makes them."""

_CHUNK_BYTES: Final = 256 * 1024
"""A codec's throughput does not depend on the size of its chunks (paper, 4.3)."""

_THREADS_MAX: Final = 64
"""More threads are measured as so many, because each has a piece of the memory above."""

_PAGE_ROUNDS: Final = 5
_MB: Final = 10**6

Step = Callable[[], int]
"""One piece of work in a thread; returns its bytes, 0 when nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Area:
    """Memory of a measurement: the transfers' part, then the codec's, each on a huge page."""

    transfer_address: int

    @property
    def codec_address(self) -> int:
        """Of the codec's part."""
        return self.transfer_address + TRANSFER_BYTES


@contextmanager
def mapped_area() -> Iterator[Area]:
    """Map the area, with no page in it; unmap it at the end. No thread may use it then."""
    mapping = mmap.mmap(-1, MEMORY_BYTES_MAX, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        forbid_huge_pages(address, TRANSFER_BYTES + _CODEC_BYTES)  # as the arena: only where asked for
        yield Area(address)
    finally:
        mapping.close()


def time_pages(area: Area, huge_pages: bool) -> tuple[float, float]:
    """Seconds per 10^6 bytes to populate and to release; all of the area is populated afterwards.

    Raises:
        OSError: there is not enough memory.
    """
    address = area.transfer_address
    populated, released = [], []
    for _ in range(_PAGE_ROUNDS):
        populated.append(_timed(native.populate, address, TRANSFER_BYTES, huge_pages))
        released.append(_timed(native.release, address, TRANSFER_BYTES))
    _timed(native.populate, address, TRANSFER_BYTES + _CODEC_BYTES, huge_pages)
    return median(populated) * _MB / TRANSFER_BYTES, median(released) * _MB / TRANSFER_BYTES


def _timed(call: Callable[..., int], *args: int) -> float:
    start_s = time.perf_counter()
    _check(call(*args), "memory")
    return time.perf_counter() - start_s


def _check(code: int, what: str) -> None:
    """Raise OSError for a result of `mzd.native` that is no success."""
    if code == native.EXTENT_SHORT:
        raise OSError(f"{what}: the file ends early")
    if code:
        raise OSError(-code, f"{what}: {os.strerror(-code)}")


def _num_steps(threads: int) -> int:
    return min(threads, _THREADS_MAX)


# Decoding.


def decoders(codec: Codec, area: Area, threads: int) -> list[Step]:
    """A step for each thread; it decodes the next batch of the thread's own chunks.

    Raises:
        MzdError: `internal`; the codec does not take ordinary values.
    """
    payload_bytes = -(-codec.payload_bytes(_CHUNK_BYTES) // PAGE_BYTES) * PAGE_BYTES
    num_chunks = _CODEC_BYTES // (payload_bytes + _CHUNK_BYTES)
    indices = np.arange(num_chunks, dtype=np.uint64)
    payloads = area.codec_address + payload_bytes * indices
    chunks = area.codec_address + payload_bytes * num_chunks + _CHUNK_BYTES * indices
    _encode_sample(codec, payloads.tolist(), payload_bytes)
    shares = zip(
        np.array_split(payloads, _num_steps(threads)),
        np.array_split(chunks, _num_steps(threads)),
        strict=True,
    )
    return [_decoder(codec, *share) for share in shares]


def _encode_sample(codec: Codec, payloads: Sequence[int], payload_bytes: int) -> None:
    """Fill every payload with one chunk of normally distributed values, as keys and values are."""
    sample = np.random.default_rng(0).standard_normal(_CHUNK_BYTES // 2, np.float32).astype(np.float16)
    if codec.encode_batch([sample.ctypes.data], payloads[:1], _CHUNK_BYTES) != [True]:
        raise MzdError("internal", f"the codec {codec.name} does not take ordinary values")
    for payload in payloads[1:]:
        native.copy(payload, payloads[0], payload_bytes)


def _decoder(codec: Codec, payloads: NDArray[np.uint64], chunks: NDArray[np.uint64]) -> Step:
    batch = _PIECE_BYTES_MAX // _CHUNK_BYTES
    cuts = range(batch, len(chunks), batch)
    batches = itertools.cycle(zip(np.split(payloads, cuts), np.split(chunks, cuts), strict=True))

    def decode() -> int:
        sources, targets = next(batches)
        codec.decode_batch(sources, targets, _CHUNK_BYTES)
        return len(targets) * _CHUNK_BYTES

    return decode


# Transfers.


@dataclass(frozen=True, slots=True)
class PieceFile:
    """A file as pieces. Threads take the next position each, so that it is gone through front to back.

    Attributes:
        fd: open; bypasses the page cache if `direct`.
        piece_bytes: of one transfer; whole pages.
        positions: shared by the threads; a `next` of it is atomic.
    """

    fd: int
    direct: bool
    piece_bytes: int
    num_pieces: int
    positions: Iterator[int] = field(default_factory=itertools.count)


def piece_file(fd: int, direct: bool, size_bytes: int, threads: int) -> PieceFile:
    """The first `size_bytes` of a file, a page or more, in pieces for which every thread has memory."""
    share_bytes = min(_PIECE_BYTES_MAX, TRANSFER_BYTES // _num_steps(threads), size_bytes)
    piece_bytes = share_bytes // PAGE_BYTES * PAGE_BYTES
    return PieceFile(fd, direct, piece_bytes, size_bytes // piece_bytes)


def set_direct(fd: int) -> bool:
    """Let an open file bypass the page cache from here on; False where the file system cannot."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def writers(file: PieceFile, area: Area, threads: int) -> list[Step]:
    """A step for each thread; it writes the next piece, until all are there. Raises OSError."""
    return [
        _writer(file, area.transfer_address + index * file.piece_bytes)
        for index in range(_num_steps(threads))
    ]


def _writer(file: PieceFile, address: int) -> Step:
    def write() -> int:
        position = next(file.positions)
        if position >= file.num_pieces:
            return 0
        _check(native.write_extents(file.fd, *_extent(file, position, address))[0], "writing")
        if not file.direct:
            os.fdatasync(file.fd)  # else the page cache would be timed
        return file.piece_bytes

    return write


def readers(file: PieceFile, area: Area, threads: int) -> list[Step]:
    """A step for each thread; it reads the next piece and sums it, as restoration does. Raises OSError."""
    if not file.direct:
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return [
        _reader(file, area.transfer_address + index * file.piece_bytes)
        for index in range(_num_steps(threads))
    ]


def _reader(file: PieceFile, address: int) -> Step:
    def read() -> int:
        position = next(file.positions) % file.num_pieces
        _check(native.read_extents(file.fd, *_extent(file, position, address))[0], "reading")
        native.crc32c(address, file.piece_bytes)
        if not file.direct:  # the next round must find it on the disk again
            os.posix_fadvise(file.fd, position * file.piece_bytes, file.piece_bytes, os.POSIX_FADV_DONTNEED)
        return file.piece_bytes

    return read


def _extent(
    file: PieceFile, position: int, address: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """Offset, address and size, as `mzd.native` takes them."""
    offset, place, size = np.array([[position * file.piece_bytes], [address], [file.piece_bytes]], np.uint64)
    return offset, place, size


# Rates.


async def rates(kinds: Sequence[tuple[Workers, Sequence[Step]]], seconds: float) -> list[float]:
    """Repeat the steps of every kind, all at once: bytes per second of each kind, its threads together.

    Cancelled: the step in hand of every thread ends first.

    Raises:
        OSError, MzdError: what a step raised; the others end first.
    """
    found = [0.0] * len(kinds)
    failures: list[OSError | MzdError] = []

    async def run(kind: int, workers: Workers, step: Step) -> None:
        try:
            rate = await workers.run(_repeat, step, time.perf_counter() + seconds)
            found[kind] += rate  # not in one statement: the sum before the wait would be read before it
        except (OSError, MzdError) as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for kind, (workers, steps) in enumerate(kinds):
            for step in steps:
                nursery.start_soon(run, kind, workers, step)
    if failures:
        raise failures[0]
    return found


def _repeat(step: Step, deadline_s: float) -> float:
    """Bytes per second of one thread, until the deadline or the end of the work; one step at the least."""
    done_bytes, start_s = 0, time.perf_counter()
    while size_bytes := step():
        done_bytes += size_bytes
        if time.perf_counter() >= deadline_s:
            break
    return done_bytes / (time.perf_counter() - start_s)
