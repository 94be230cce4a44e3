"""Owns the 6-bit scales and minima of Q4_K and Q5_K: twelve packed bytes in GGUF, sixteen plain ones here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK_WEIGHTS = 256
NUM_SUB_BLOCKS = 8  # of 32 weights, each with a scale and a minimum of its own
PACKED_BYTES = 12


def unpack_scales(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(..., 12) uint8 of packed scales to (..., 8, 2): scale and minimum of each sub-block, 0 to 63.

    Bytes 0-3 and 4-7 hold the scales and the minima of sub-blocks 0-3 in their low six bits, and in the two
    others the high bits of those of sub-blocks 4-7, whose low four bits share the nibbles of bytes 8-11.

    Source: ggml-quants.c, `get_scale_min_k4`.
    """
    scales, minima, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    unpacked = np.empty((*packed.shape[:-1], NUM_SUB_BLOCKS, 2), np.uint8)
    unpacked[..., :4, 0] = scales & 63
    unpacked[..., :4, 1] = minima & 63
    unpacked[..., 4:, 0] = (rest & 15) | (scales >> 6 << 4)
    unpacked[..., 4:, 1] = (rest >> 4) | (minima >> 6 << 4)
    return unpacked


def pack_scales(unpacked: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo `unpack_scales`: (..., 8, 2) uint8, each below 64, to (..., 12)."""
    first, second = unpacked[..., :4, :], unpacked[..., 4:, :]
    packed = np.empty((*unpacked.shape[:-2], PACKED_BYTES), np.uint8)
    packed[..., 0:4] = first[..., 0] | (second[..., 0] >> 4 << 6)
    packed[..., 4:8] = first[..., 1] | (second[..., 1] >> 4 << 6)
    packed[..., 8:12] = (second[..., 0] & 15) | (second[..., 1] << 4)
    return packed
