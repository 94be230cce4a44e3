"""Owns the checks of the NumPy stand-in's arguments; the messages are those of the C side."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Buffer

    BufferOrArray: TypeAlias = Buffer | NDArray[Any]  # NumPy types its arrays as buffers from Python 3.12 on

ADDRESS_SPACE_BYTES = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p))


def unsigned_array(data: BufferOrArray, name: str, dtype: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """View a one-dimensional buffer of one unsigned type, without a copy.

    Raises:
        ValueError: other dimensions, another item type, or not contiguous.
    """
    array: NDArray[Any] = np.asarray(memoryview(data))  # type: ignore[arg-type]
    if array.ndim != 1 or array.dtype != np.dtype(dtype) or not array.flags.c_contiguous:
        raise ValueError(f"{name} must be a one-dimensional array of {np.dtype(dtype)}")
    return array


def check_same_length(first: NDArray[Any], first_name: str, second: NDArray[Any], second_name: str) -> None:
    """Raises: ValueError unless both hold the same number of items."""
    if len(first) != len(second):
        raise ValueError(f"{first_name} has {len(first)} items and {second_name} has {len(second)}")


def check_unsigned(value: int, maximum: int) -> int:
    """Raises: ValueError unless value is in 0..maximum."""
    if not 0 <= value <= maximum:
        raise ValueError(f"{value!r} is not in 0..{maximum}")
    return value


def check_range(address: int, size: int, name: str, *, alignment: int = 1) -> None:
    """Raises: ValueError if ``[address, address + size)`` is null, wraps around or starts off alignment."""
    check_unsigned(address, 2**64 - 1)
    check_unsigned(size, ADDRESS_SPACE_BYTES // 2 - 1)
    if size == 0:
        return
    if address == 0:
        raise ValueError(f"{name} is a null address")
    if address + size >= ADDRESS_SPACE_BYTES:
        raise ValueError(f"{name}: {size} bytes at {address} wrap around the address space")
    if address % alignment:
        raise ValueError(f"{name}: address {address} is not a multiple of {alignment}")


def bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    """(size,) uint8 over memory that the caller keeps mapped; writes go through."""
    if size == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
