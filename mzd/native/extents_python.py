"""Owns extent I/O through `os.preadv` and `os.pwritev`, for installations without the C extension."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from mzd.native.arguments import bytes_at, check_range, check_same_length, unsigned_array
from mzd.native.crc32c_numpy import crc32c_buffer

if TYPE_CHECKING:
    from mzd.native.arguments import BufferOrArray

EXTENT_SHORT: Final = 1
"""Result of an extent that the file ended inside of; positive, so that it is no -errno."""

_PIECE_BYTES: Final = 4 * 1024 * 1024

_Transfer = Callable[[int, list[memoryview], int], int]


def _is_at_end(fd: int, offset: int) -> bool:
    return offset >= os.fstat(fd).st_size


def _transfer(call: _Transfer, fd: int, offset: int, memory: memoryview) -> int:
    """All of one extent, in pieces: 0, -errno or EXTENT_SHORT. Python itself repeats after EINTR."""
    done = 0
    while done < len(memory):
        try:
            count = _move(call, fd, memory[done : done + _PIECE_BYTES], offset + done)
        except OSError as error:
            # Some file systems refuse the unaligned offset that follows a short direct read at the end.
            is_short = error.errno == errno.EINVAL and done > 0 and _is_at_end(fd, offset + done)
            return EXTENT_SHORT if is_short else -(error.errno or errno.EIO)
        if count == 0:
            return EXTENT_SHORT
        done += count
    return 0


def _move(call: _Transfer, fd: int, piece: memoryview, offset: int) -> int:
    """One call, and by way of aligned memory where direct I/O refuses the piece's address."""
    try:
        return call(fd, [piece], offset)
    except OSError as error:
        is_aligned = np.frombuffer(piece, np.uint8).ctypes.data % mmap.PAGESIZE == 0
        if error.errno != errno.EINVAL or is_aligned:
            raise
    with mmap.mmap(-1, len(piece)) as way, memoryview(way) as aligned:
        aligned[:] = piece  # for a read too: what it leaves alone stays
        count = call(fd, [aligned], offset)
        if call is not os.pwritev:
            piece[:count] = aligned[:count]
        return count


def _checksums(
    crc_out: BufferOrArray | None, seeds: BufferOrArray | None, offsets: NDArray[Any]
) -> NDArray[Any] | None:
    """crc_out as an array that holds the seeds, or None if no checksum is wanted."""
    if crc_out is None:
        if seeds is not None:
            raise ValueError("seeds without crc_out")
        return None
    crcs = unsigned_array(crc_out, "crc_out", np.uint32)
    check_same_length(offsets, "offsets", crcs, "crc_out")
    if seeds is None:
        crcs[:] = 0
    else:
        given = unsigned_array(seeds, "seeds", np.uint32)
        check_same_length(offsets, "offsets", given, "seeds")
        crcs[:] = given
    return crcs


def _places(
    offsets: NDArray[Any], addresses: BufferOrArray, sizes: BufferOrArray
) -> list[tuple[int, int, int]]:
    memory = unsigned_array(addresses, "addresses", np.uint64)
    lengths = unsigned_array(sizes, "sizes", np.uint64)
    check_same_length(offsets, "offsets", memory, "addresses")
    check_same_length(offsets, "offsets", lengths, "sizes")
    places = list(zip(offsets.tolist(), memory.tolist(), lengths.tolist(), strict=True))
    for index, (offset, address, size) in enumerate(places):
        if offset + size > 2**63 - 1:
            raise ValueError(f"extent {index}: {size} bytes at {offset} end past any file")
        check_range(address, size, "addresses")
    return places


def _transfer_extents(
    call: _Transfer,
    fd: int,
    offsets: BufferOrArray,
    addresses: BufferOrArray,
    sizes: BufferOrArray,
    crc_out: BufferOrArray | None,
    seeds: BufferOrArray | None,
) -> list[int]:
    starts = unsigned_array(offsets, "offsets", np.uint64)
    places = _places(starts, addresses, sizes)
    crcs = _checksums(crc_out, seeds, starts)
    results = []
    for index, (offset, address, size) in enumerate(places):
        content = bytes_at(address, size)
        results.append(_transfer(call, fd, offset, content.data))
        if crcs is not None:
            crcs[index] = crc32c_buffer(content, int(crcs[index]))
    return results


def read_extents(
    fd: int,
    offsets: BufferOrArray,
    addresses: BufferOrArray,
    sizes: BufferOrArray,
    crc_out: BufferOrArray | None = None,
    seeds: BufferOrArray | None = None,
) -> list[int]:
    """Read each extent of a file to memory.

    Args:
        fd: an open file; with O_DIRECT, offsets, addresses and sizes are multiples of its block size.
        offsets: uint64, bytes in the file.
        addresses: uint64, where each extent goes.
        sizes: uint64, bytes.
        crc_out: uint32, written: CRC-32C of each extent's content; unspecified where it failed.
        seeds: uint32, what each CRC continues (of an extent's place, for instance); 0 if not given.

    Returns:
        One result an extent: 0, -errno, or EXTENT_SHORT if the file ended inside it.

    Raises:
        ValueError: lengths differ, or an address, offset or size cannot be.
    """
    return _transfer_extents(os.preadv, fd, offsets, addresses, sizes, crc_out, seeds)


def write_extents(
    fd: int,
    offsets: BufferOrArray,
    addresses: BufferOrArray,
    sizes: BufferOrArray,
    crc_out: BufferOrArray | None = None,
    seeds: BufferOrArray | None = None,
) -> list[int]:
    """Write each extent from memory; arguments and results as for `read_extents`."""
    return _transfer_extents(os.pwritev, fd, offsets, addresses, sizes, crc_out, seeds)
