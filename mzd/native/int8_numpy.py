"""Owns the int8 KV codec in NumPy: the definition of its bits, and the path without the C extension.

A chunk is n FP16 elements in memory order, n a positive multiple of 32; each 32 neighbours are a group.
The payload is two planes, ``peak`` uint16 (n / 32) of FP16 bits and ``code`` int8 (n): 46.875 % less. With m
the element of largest magnitude in a group (the positive one of a tie)::

    peak = -m, or 2**-17 if abs(m) < 2**-17
    code = clip(rint(x * (128 / peak)), -128, 127)
    x'   = float16(code * (peak / 128) + 0)

all in binary32, each operation rounded to nearest, ties to even. m gets code -128 and comes back as itself,
so a second round trip finds the same peak, and then the same codes: the proof is in `native/int8_codec.h`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mzd.native import pages_ctypes
from mzd.native.arguments import bytes_at, check_range, check_same_length, check_unsigned, unsigned_array

if TYPE_CHECKING:
    from mzd.native.arguments import BufferOrArray

INT8_GROUP: Final = 32
INT8_OK: Final = 0
INT8_NOT_FINITE: Final = 1
INT8_NOT_RELEASED: Final = 2

_BLOCK_GROUPS: Final = 2048
"""Groups of one NumPy step, so that float32 copies stay at 256 KiB when memory is short."""

_KEY_FLOOR: Final = 0x0100
_KEY_NOT_FINITE: Final = 0xF800


def peaks_of(halves: NDArray[np.uint16]) -> NDArray[np.uint16] | None:
    """The stored peak of each group.

    Args:
        halves: (num_groups, 32) uint16, FP16 bits.

    Returns:
        (num_groups,) uint16, or None if an element is infinite or NaN.
    """
    # Rotated by one, bits order by magnitude; flipping the last one puts a tie's positive element first.
    keys = ((halves << np.uint16(1)) | (halves >> np.uint16(15))) ^ np.uint16(1)
    largest = keys.max(axis=1)
    if (largest >= _KEY_NOT_FINITE).any():
        return None
    negated = (largest >> np.uint16(1)) | (largest << np.uint16(15))
    return np.where(largest < _KEY_FLOOR, np.uint16(_KEY_FLOOR >> 1), negated).astype(np.uint16)


def codes_of(halves: NDArray[np.uint16], peaks: NDArray[np.uint16]) -> NDArray[np.int8]:
    """Codes (num_groups, 32) int8 of groups (num_groups, 32) under their peaks (num_groups,)."""
    inverse_scales = np.float32(128) / peaks.view(np.float16).astype(np.float32)
    quotients = halves.view(np.float16).astype(np.float32) * inverse_scales[:, None]
    return np.clip(np.rint(quotients), -128, 127).astype(np.int8)


def halves_of(codes: NDArray[np.int8], peaks: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """FP16 bits (num_groups, 32) of codes (num_groups, 32) under their peaks (num_groups,)."""
    scales = peaks.view(np.float16).astype(np.float32) * np.float32(2**-7)
    values = codes.astype(np.float32) * scales[:, None] + np.float32(0)  # a zero code is +0
    return values.astype(np.float16).view(np.uint16)


def _blocks(num_groups: int) -> list[slice]:
    return [slice(start, start + _BLOCK_GROUPS) for start in range(0, num_groups, _BLOCK_GROUPS)]


def _planes(payload: NDArray[np.uint8], num_groups: int) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    peaks = payload[: 2 * num_groups].view(np.uint16)
    codes = payload[2 * num_groups :].view(np.int8).reshape(num_groups, INT8_GROUP)
    return peaks, codes


def encode_chunk(halves: NDArray[np.uint16], payload: NDArray[np.uint8]) -> bool:
    """Fill payload from one chunk; False, with the payload unspecified, if an element is not finite.

    Args:
        halves: (num_elements,) uint16, FP16 bits; num_elements a positive multiple of 32.
        payload: (int8_payload_bytes(num_elements),) uint8, written; apart from `halves`.
    """
    groups = halves.reshape(-1, INT8_GROUP)
    peaks, codes = _planes(payload, len(groups))
    for block in _blocks(len(groups)):
        block_peaks = peaks_of(groups[block])
        if block_peaks is None:
            return False
        peaks[block] = block_peaks
        codes[block] = codes_of(groups[block], block_peaks)
    return True


def decode_chunk(payload: NDArray[np.uint8], halves: NDArray[np.uint16]) -> None:
    """Fill one chunk from its payload; shapes as in `encode_chunk`."""
    groups = halves.reshape(-1, INT8_GROUP)
    peaks, codes = _planes(payload, len(groups))
    for block in _blocks(len(groups)):
        groups[block] = halves_of(codes[block], peaks[block])


def _check_num_elements(num_elements: int) -> int:
    check_unsigned(num_elements, 2**63 - 1)
    if num_elements == 0 or num_elements % INT8_GROUP:
        raise ValueError(f"num_elements must be a positive multiple of {INT8_GROUP}, not {num_elements}")
    return num_elements


def _check_variant(variant: str) -> None:
    if variant not in ("auto", *int8_variants()):
        raise ValueError(f"this CPU has no int8 variant '{variant}'")


def _address_pairs(
    src: BufferOrArray, dst: BufferOrArray, src_bytes: int, dst_bytes: int
) -> list[tuple[int, int]]:
    """The batch as pairs of addresses, each range checked and each pair apart."""
    sources, targets = unsigned_array(src, "src", np.uint64), unsigned_array(dst, "dst", np.uint64)
    check_same_length(sources, "src", targets, "dst")
    pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
    for index, (source, target) in enumerate(pairs):
        check_range(source, src_bytes, "src", alignment=2)
        check_range(target, dst_bytes, "dst", alignment=2)
        if source < target + dst_bytes and target < source + src_bytes:
            raise ValueError(f"src and dst of chunk {index} overlap")
    return pairs


def int8_variants() -> list[str]:
    """Names of the variants, fastest first."""
    return ["numpy"]


def int8_payload_bytes(num_elements: int, /) -> int:
    """Size of the payload of a chunk.

    Raises:
        ValueError: num_elements is no positive multiple of 32.
    """
    return _check_num_elements(num_elements) // INT8_GROUP * 2 + num_elements


def int8_encode_batch(
    src: BufferOrArray, dst: BufferOrArray, num_elements: int, status: BufferOrArray, variant: str = "auto"
) -> None:
    """Encode each FP16 chunk at ``src[i]`` into the payload at ``dst[i]``.

    Args:
        src: uint64 addresses of chunks, even.
        dst: uint64 addresses of payloads, even, apart from every source.
        num_elements: of each chunk; a positive multiple of 32.
        status: uint8, written: INT8_OK or INT8_NOT_FINITE.
        variant: a name of `int8_variants`, or ``auto``.

    Raises:
        ValueError: lengths differ, an address or size cannot be, an unknown variant.
    """
    int8_encode_release_batch(src, dst, num_elements, 0, status, variant)


def int8_encode_release_batch(
    src: BufferOrArray,
    dst: BufferOrArray,
    num_elements: int,
    release_bytes: int,
    status: BufferOrArray,
    variant: str = "auto",
) -> None:
    """As `int8_encode_batch`, and give back the whole pages in each source before the next chunk.

    Args:
        release_bytes: of each source, from its address on; pages that it covers in part stay.
        status: INT8_NOT_RELEASED too; a chunk that is not finite keeps its pages.
    """
    _check_variant(variant)
    payload_bytes = int8_payload_bytes(num_elements)
    statuses = unsigned_array(status, "status", np.uint8)
    pairs = _address_pairs(src, dst, max(2 * num_elements, release_bytes), payload_bytes)
    check_same_length(unsigned_array(src, "src", np.uint64), "src", statuses, "status")
    for index, (source, target) in enumerate(pairs):
        halves = bytes_at(source, 2 * num_elements).view(np.uint16)
        if not encode_chunk(halves, bytes_at(target, payload_bytes)):
            statuses[index] = INT8_NOT_FINITE
        elif pages_ctypes.release_inside(source, release_bytes) != 0:
            statuses[index] = INT8_NOT_RELEASED
        else:
            statuses[index] = INT8_OK


def int8_decode_batch(
    src: BufferOrArray, dst: BufferOrArray, num_elements: int, variant: str = "auto"
) -> None:
    """Decode each payload at ``src[i]`` into the FP16 chunk at ``dst[i]``; arguments as for encoding."""
    _check_variant(variant)
    payload_bytes = int8_payload_bytes(num_elements)
    for source, target in _address_pairs(src, dst, payload_bytes, 2 * num_elements):
        decode_chunk(bytes_at(source, payload_bytes), bytes_at(target, 2 * num_elements).view(np.uint16))
