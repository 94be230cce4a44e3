"""Owns an open weight store: its index, the descriptor that layers are read through, and embedding rows."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mzd import native
from mzd.errors import FormatError, MzdError
from mzd.formats.quantization import dequantize
from mzd.formats.weight_layout import ROWS_PER_GROUP, row_group_extent, unpack_blocks
from mzd.formats.weight_store import (
    EXTENT_ALIGNMENT_BYTES,
    HEADER_BYTES,
    StoreIndex,
    StoreVersionError,
    TensorSpec,
    UnitExtent,
    decode_header,
    decode_index,
)

# Row groups unpacked at a time: a long prompt's embedding takes some MiB besides its result.
GROUPS_PER_BATCH = 256

CHECK_BYTES = 4 * 1024**2
"""What a check of all checksums holds at a time; a multiple of 4096."""


class WeightStore:
    """A weight store opened for reading; what is read later comes from the file that was opened.

    All methods but `close` may be called from several threads at once.

    Attributes:
        path: where it was opened.
        index: what is in it.
        fd: for reading extents, at multiples of 4096 only if `direct`; owned by this object.
        direct: whether `fd` bypasses the page cache (O_DIRECT), as the file system allows.
    """

    def __init__(self, path: Path, cached_fd: int, index: StoreIndex) -> None:
        """Takes over `cached_fd`; use `open`."""
        self.path = path
        self.index = index
        self._cached_fd = cached_fd  # rows are small and not aligned: they go through the page cache
        self._at_open = os.fstat(cached_fd)
        direct_fd = _open_direct(path, self._at_open)
        self.direct = direct_fd is not None
        self.fd = cached_fd if direct_fd is None else direct_fd
        if self.direct:  # only rows are read through the cache now: no read-ahead
            os.posix_fadvise(cached_fd, 0, 0, os.POSIX_FADV_RANDOM)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a store and check its index.

        Raises:
            StoreVersionError: made by another version of mzd; import it anew.
            MzdError: `weights_unavailable`; missing, unreadable or damaged.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise _unavailable(path, f"cannot be opened: {error.strerror}") from error
        try:
            return cls(path, fd, _read_index(fd, path))
        except BaseException:
            os.close(fd)
            raise

    def check_identity(self) -> None:
        """Check that the file at `path` is still the one that was opened, unchanged.

        Raises:
            MzdError: `weights_unavailable` if it is gone or cut off; `model_changed` if another file is in
                its place or it was written to.
        """
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except OSError as error:
            raise _unavailable(self.path, f"is gone: {error.strerror}") from error
        then = self._at_open
        if (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
            raise _changed(self.path, "another file is in its place")
        if now.st_size < then.st_size:
            raise _unavailable(self.path, f"was cut from {then.st_size} bytes to {now.st_size}")
        if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            raise _changed(self.path, "it was written to")

    def check_contents(self) -> None:
        """Read every unit and check its CRC-32C; the GIL is free meanwhile, and memory stays at some MiB.

        Raises:
            MzdError: `weights_unavailable`; a unit is damaged, cut off or unreadable.
        """
        index = self.index
        names = [*(f"layer {number}" for number in range(len(index.layers))), "embedding and output matrix"]
        with mmap.mmap(-1, CHECK_BYTES) as buffer:  # page-aligned, as direct I/O asks
            for name, unit in zip(names, (*index.layers, index.head), strict=True):
                if self._checksum(unit, np.frombuffer(buffer, np.uint8).ctypes.data) != unit.crc32c:
                    raise _unavailable(self.path, f"is damaged: {name} has another checksum")

    def read_rows(self, role: str, rows: Sequence[int] | NDArray[np.integer]) -> NDArray[np.float32]:
        """Read rows of a matrix of the head unit by themselves, without the rest of the unit.

        Args:
            role: `token_embd` or `output`.
            rows: in any order, repetitions allowed; each row group is read once per batch.

        Returns:
            (len(rows), cols) float32, newly allocated.

        Raises:
            FormatError: the unit has no such matrix, or it has no such row.
            MzdError: `weights_unavailable`; the file is cut off or unreadable.
        """
        spec = self.index.head.tensor(role)
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < spec.rows):
            raise FormatError(f"rows {wanted.min()} to {wanted.max()} of {spec.rows} in {role!r}", role=role)
        order = np.argsort(wanted, kind="stable")  # file order: neighbours share a group, reads go forward
        values = np.empty((wanted.size, spec.cols), np.float32)
        for part in _split_by_groups(wanted[order], order):
            values[part] = self._read_batch(spec, wanted[part])
        return values

    def close(self) -> None:
        """Close the file; no read may be running."""
        if self.direct:
            os.close(self.fd)
        os.close(self._cached_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _checksum(self, unit: UnitExtent, address: int) -> int | None:
        """CRC-32C of a unit, read by way of `CHECK_BYTES` bytes at `address`; None if it cannot be read."""
        crc = np.zeros(1, np.uint32)
        for start_bytes in range(0, unit.size_bytes, CHECK_BYTES):
            size_bytes = min(CHECK_BYTES, unit.size_bytes - start_bytes)
            extent = (unit.offset_bytes + start_bytes, address, size_bytes)
            offsets, addresses, sizes = (np.array([value], np.uint64) for value in extent)
            if any(native.read_extents(self.fd, offsets, addresses, sizes, crc, crc.copy())):
                return None
        return int(crc[0])

    def _read_batch(self, spec: TensorSpec, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """(len(rows), cols) float32 of sorted rows from at most `GROUPS_PER_BATCH` groups."""
        groups, place = np.unique(rows // ROWS_PER_GROUP, return_inverse=True)
        packed = np.concatenate([self._read_group(spec, int(group)) for group in groups])
        blocks = unpack_blocks(spec.type, packed, groups.size * ROWS_PER_GROUP, spec.cols)
        wanted = blocks[place * ROWS_PER_GROUP + rows % ROWS_PER_GROUP]
        return dequantize(spec.type, wanted, rows.size * spec.cols).reshape(rows.size, spec.cols)

    def _read_group(self, spec: TensorSpec, group: int) -> NDArray[np.uint8]:
        """The bytes of one eight-row group."""
        offset_bytes, size_bytes = row_group_extent(spec.type, spec.rows, spec.cols, group * ROWS_PER_GROUP)
        start_bytes = self.index.head.offset_bytes + spec.offset_bytes + offset_bytes
        return np.frombuffer(_read_exactly(self._cached_fd, start_bytes, size_bytes, self.path), np.uint8)


def _split_by_groups(sorted_rows: NDArray[np.int64], order: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut `order` where `GROUPS_PER_BATCH` row groups are full; a group stays in one piece."""
    if not sorted_rows.size:
        return []
    groups = sorted_rows // ROWS_PER_GROUP
    ordinal = np.cumsum(np.diff(groups, prepend=groups[0]) != 0)  # 0, 1, ... per distinct group
    cuts = np.flatnonzero(np.diff(ordinal // GROUPS_PER_BATCH)) + 1
    return list(np.split(order, cuts))


def _read_index(fd: int, path: Path) -> StoreIndex:
    try:
        file_bytes = os.fstat(fd).st_size
        place = decode_header(_read_exactly(fd, 0, min(HEADER_BYTES, file_bytes), path), file_bytes)
        return decode_index(_read_exactly(fd, place.offset_bytes, place.size_bytes, path), place)
    except StoreVersionError as error:
        raise StoreVersionError(f"{path}: {error.message}", code=error.code, path=str(path)) from error
    except FormatError as error:
        raise _unavailable(path, f"cannot be used: {error.message}") from error


def _read_exactly(fd: int, offset_bytes: int, size_bytes: int, path: Path) -> bytes:
    """`size_bytes` bytes at a position, in as many reads as it takes."""
    pieces: list[bytes] = []
    while size_bytes > 0:
        try:
            piece = os.pread(fd, size_bytes, offset_bytes)
        except OSError as error:
            raise _unavailable(path, f"cannot be read at byte {offset_bytes}: {error.strerror}") from error
        if not piece:
            raise _unavailable(path, f"ends at byte {offset_bytes}")
        pieces.append(piece)
        offset_bytes += len(piece)
        size_bytes -= len(piece)
    return b"".join(pieces)


def _open_direct(path: Path, expected: os.stat_result) -> int | None:
    """A second descriptor of the same file that bypasses the page cache, or None where that does not work."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError:
        return None
    found = os.fstat(fd)
    if os.path.samestat(found, expected) and _reads_directly(fd):
        return fd
    os.close(fd)
    return None


def _reads_directly(fd: int) -> bool:
    """Try one block: some file systems accept the flag and fail the read."""
    with mmap.mmap(-1, EXTENT_ALIGNMENT_BYTES) as page:  # a page is aligned as direct I/O wants
        try:
            return os.preadv(fd, [page], 0) == EXTENT_ALIGNMENT_BYTES
        except OSError:
            return False


def _unavailable(path: Path, reason: str) -> MzdError:
    return MzdError("weights_unavailable", f"the weight store {path} {reason}", path=str(path))


def _changed(path: Path, reason: str) -> MzdError:
    return MzdError("model_changed", f"the weight store {path} has changed: {reason}", path=str(path))
