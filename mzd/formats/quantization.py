"""Owns the meaning of quantised weights: the reference, in NumPy, that every kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError
from mzd.formats.ggml_types import GgmlType

_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])


def dequantize(type: GgmlType, raw: NDArray[np.uint8], num_weights: int) -> NDArray[np.float32]:
    """Expand weights as they lie in a GGUF file to float32, in file order.

    Args:
        raw: uint8, C-contiguous, any shape; whole blocks, exactly those of `num_weights`.
        num_weights: a multiple of the type's block.

    Returns:
        (num_weights,) float32, newly allocated.

    Raises:
        FormatError: `unsupported_type`, or `raw` is not the size that `num_weights` needs.
    """
    decode = _DECODERS.get(type)
    if decode is None:
        raise FormatError(
            f"weights of type {type.name} cannot be read", code="unsupported_type", type=type.name
        )
    expected_bytes = type.row_bytes(num_weights)
    if num_weights % type.block_weights or raw.size != expected_bytes:
        raise FormatError(
            f"{num_weights} {type.name} weights need {expected_bytes} bytes in whole blocks of "
            f"{type.block_weights}, found {raw.size}",
            expected=expected_bytes,
            found=raw.size,
        )
    with np.errstate(invalid="ignore"):  # a scale of infinity is the file's choice, not a fault of ours
        return decode(raw.reshape(-1))


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(4n,) uint8 of little-endian float32 to (n,) float32."""
    return raw.view("<f4").astype(np.float32)


def _f16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(2n,) uint8 of little-endian float16 to (n,) float32; exact."""
    return raw.view("<f2").astype(np.float32)


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(34n,) uint8 to (32n,) float32. Block: fp16 scale, 32 int8; w = scale * q."""
    blocks = raw.view(_Q8_0)
    return (_column(blocks, "scale") * blocks["quants"].astype(np.float32)).reshape(-1)


def _q4_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(18n,) uint8 to (32n,) float32. Block: fp16 scale, 32 nibbles; w = scale * (q - 8)."""
    blocks = raw.view(_Q4_0)
    return (_column(blocks, "scale") * (_nibbles(blocks["nibbles"]) - np.float32(8))).reshape(-1)


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(20n,) uint8 to (32n,) float32. Block: fp16 scale, fp16 minimum, 32 nibbles; w = scale * q + min."""
    blocks = raw.view(_Q4_1)
    scaled = _column(blocks, "scale") * _nibbles(blocks["nibbles"])
    return (scaled + _column(blocks, "minimum")).reshape(-1)


def _column(blocks: NDArray[Any], field: str) -> NDArray[np.float32]:
    """One fp16 header field of (n,) blocks as (n, 1) float32, to go with rows of 32 weights."""
    return blocks[field].astype(np.float32).reshape(-1, 1)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n, 16) uint8 to (n, 32) float32: the low nibbles are weights 0..15, the high ones 16..31."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


_DECODERS: dict[GgmlType, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _f16,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
}
