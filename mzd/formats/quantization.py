"""Owns the meaning of quantised weights: the reference, in NumPy, that every kernel is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.k_quants import NUM_SUB_BLOCKS, unpack_scales

_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
_Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("scales", "u1", 12), ("nibbles", "u1", (4, 32))])
_Q5_K = np.dtype(
    [
        ("scale", "<f2"),
        ("minimum", "<f2"),
        ("scales", "u1", 12),
        ("high_bits", "u1", 32),
        ("nibbles", "u1", (4, 32)),
    ]
)
_Q6_K = np.dtype(
    [("nibbles", "u1", (2, 64)), ("high_bits", "u1", (2, 32)), ("scales", "i1", 16), ("scale", "<f2")]
)


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


def _bf16(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(2n,) uint8 of little-endian bfloat16 to (n,) float32: the upper halves of its bits; exact."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


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


def _q4_k(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(144n,) uint8 to (256n,) float32.

    Block: fp16 scale and minimum, 6-bit scales and minima of eight sub-blocks, and for each two of those 32
    bytes, low nibbles first; w = scale * sub_scale * q - minimum * sub_minimum.
    """
    blocks = raw.view(_Q4_K)
    return _scaled_sub_blocks(blocks, _sub_block_nibbles(blocks["nibbles"]))


def _q5_k(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(176n,) uint8 to (256n,) float32.

    Block: as Q4_K, with 32 bytes before the nibbles; their bits b are bits 4 of sub-block b.
    """
    blocks = raw.view(_Q5_K)
    shifts = np.arange(NUM_SUB_BLOCKS, dtype=np.uint8).reshape(-1, 1)
    high: NDArray[np.uint8] = blocks["high_bits"][:, np.newaxis] >> shifts & np.uint8(1)
    return _scaled_sub_blocks(blocks, _sub_block_nibbles(blocks["nibbles"]) | high << np.uint8(4))


def _q6_k(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(210n,) uint8 to (256n,) float32.

    Block: for each half 64 bytes, whose low nibbles are its first 64 weights; then for each half 32 bytes
    whose bits 2i and 2i + 1 are bits 4 and 5 of its i-th 32 weights; int8 scales of 16 weights; fp16 scale.
    w = scale * sub_scale * (q - 32).
    """
    blocks = raw.view(_Q6_K)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(-1, 1)
    high = (blocks["high_bits"][:, :, np.newaxis] >> shifts & 3).reshape(-1, NUM_SUB_BLOCKS, 32)
    quants = _sub_block_nibbles(blocks["nibbles"]) | high << 4
    scales = _column(blocks, "scale") * blocks["scales"].astype(np.float32)
    centred = quants.reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    return (scales[:, :, np.newaxis] * centred).reshape(-1)


def _sub_block_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, runs, bytes) uint8 to (n, 8, 32): of each run the low nibbles, then the high ones."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, NUM_SUB_BLOCKS, 32)


def _scaled_sub_blocks(blocks: NDArray[Any], quants: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n,) blocks of Q4_K or Q5_K with their (n, 8, 32) quants to (256n,) float32."""
    factors = unpack_scales(blocks["scales"]).astype(np.float32)
    scales = _column(blocks, "scale") * factors[..., 0]
    minima = _column(blocks, "minimum") * factors[..., 1]
    return (scales[..., np.newaxis] * quants.astype(np.float32) - minima[..., np.newaxis]).reshape(-1)


def _column(blocks: NDArray[Any], field: str) -> NDArray[np.float32]:
    """One fp16 header field of (n,) blocks as (n, 1) float32, to go with rows of weights."""
    return blocks[field].astype(np.float32).reshape(-1, 1)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(n, 16) uint8 to (n, 32) float32: the low nibbles are weights 0..15, the high ones 16..31."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


_DECODERS: dict[GgmlType, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    GgmlType.F32: _f32,
    GgmlType.F16: _f16,
    GgmlType.BF16: _bf16,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q4_K: _q4_k,
    GgmlType.Q5_K: _q5_k,
    GgmlType.Q6_K: _q6_k,
}
