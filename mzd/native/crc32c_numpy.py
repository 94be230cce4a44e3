"""Owns CRC-32C in NumPy, for installations without the C extension: many lanes at once, then joined.

A register moves past zero bytes by a linear map on its 32 bits, kept as four tables of 256 entries. The map
of twice as many bytes is the map applied to its own tables, so that any power of two is near.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from mzd.native.arguments import bytes_at, check_range, check_unsigned

if TYPE_CHECKING:
    from mzd.native.arguments import BufferOrArray

_POLYNOMIAL: Final = np.uint32(0x82F63B78)
_LANES: Final = 1024


def _byte_table() -> NDArray[np.uint32]:
    registers = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        registers = (registers >> np.uint32(1)) ^ ((registers & np.uint32(1)) * _POLYNOMIAL)
    return registers


_TABLE: Final = _byte_table()


def _mapped(tables: NDArray[np.uint32], registers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Registers (any shape) through a map (4, 256)."""
    moved: NDArray[np.uint32] = tables[0][registers & 0xFF]
    for byte in range(1, 4):
        moved = moved ^ tables[byte][(registers >> np.uint32(8 * byte)) & 0xFF]
    return moved


@cache
def _past_zeros(log2_bytes: int) -> NDArray[np.uint32]:
    """(4, 256) uint32: the map of a register past ``2 ** log2_bytes`` zero bytes."""
    if log2_bytes > 0:
        half = _past_zeros(log2_bytes - 1)
        return _mapped(half, half)
    single = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]
    moved: NDArray[np.uint32] = (single >> np.uint32(8)) ^ _TABLE[single & 0xFF]
    return moved


def _block_register(block: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """(1,) uint32: the register after a block (_LANES, lane_bytes) that started from zero."""
    registers = np.zeros(len(block), np.uint32)
    for column in np.ascontiguousarray(block.T):
        registers = (registers >> np.uint32(8)) ^ _TABLE[(registers ^ column) & 0xFF]
    log2_bytes = block.shape[1].bit_length() - 1
    while len(registers) > 1:
        registers = _mapped(_past_zeros(log2_bytes), registers[0::2]) ^ registers[1::2]
        log2_bytes += 1
    return registers


def _updated(register: int, data: NDArray[np.uint8]) -> int:
    while data.size >= 4 * _LANES:
        log2_bytes = min((data.size // _LANES).bit_length() - 1, 12)
        block = data[: _LANES << log2_bytes].reshape(_LANES, -1)
        moved = _mapped(_past_zeros(log2_bytes + _LANES.bit_length() - 1), np.array([register], np.uint32))
        register = int((moved ^ _block_register(block))[0])
        data = data[block.size :]
    table = _TABLE.tolist()
    for byte in data.tobytes():
        register = (register >> 8) ^ table[(register ^ byte) & 0xFF]
    return register


def _checked_crc(data: NDArray[np.uint8], seed: int, variant: str) -> int:
    if variant not in ("auto", *crc32c_variants()):
        raise ValueError(f"this CPU has no crc32c variant '{variant}'")
    return _updated(check_unsigned(seed, 2**32 - 1) ^ 0xFFFFFFFF, data) ^ 0xFFFFFFFF


def crc32c_variants() -> list[str]:
    """Names of the variants, fastest first."""
    return ["numpy"]


def crc32c(address: int, size: int, seed: int = 0, variant: str = "auto") -> int:
    """CRC-32C of memory, continued from `seed`, the CRC of what came before.

    Raises:
        ValueError: a null address, a range that cannot be, an unknown variant.
    """
    check_range(address, size, "address")
    return _checked_crc(bytes_at(address, size), seed, variant)


def crc32c_buffer(data: BufferOrArray, seed: int = 0, variant: str = "auto") -> int:
    """CRC-32C of a contiguous buffer of any type, continued from `seed`."""
    view = memoryview(data)  # type: ignore[arg-type]
    return _checked_crc(np.frombuffer(view.cast("B") if view.nbytes else b"", np.uint8), seed, variant)
