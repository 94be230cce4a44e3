"""Owns random GGUF blocks of every type, for tests of layouts and kernels."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from mzd.formats.ggml_types import GgmlType

# Where the fp16 of a block of the K types lie, and the largest value for weights of about one.
_HALVES = {
    GgmlType.Q4_K: ((0, 0.005), (2, 0.04)),
    GgmlType.Q5_K: ((0, 0.0025), (2, 0.04)),
    GgmlType.Q6_K: ((208, 0.001),),
}


def random_blocks(type: GgmlType, rows: int, cols: int, seed: int) -> NDArray[np.uint8]:
    """(rows, row_bytes) uint8: normal weights, or, where the gguf package cannot pack them, random quants."""
    rng = np.random.default_rng(seed)
    if type in _HALVES:
        return _random_k_blocks(type, rows, cols, rng)
    weights = rng.standard_normal((rows, cols)).astype(np.float32)
    quantized = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(type)))
    return quantized.view(np.uint8).reshape(rows, -1)


def values_of(type: GgmlType, raw: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.float32]:
    """(rows, cols): what the gguf package reads in blocks."""
    values = gguf.quants.dequantize(raw.reshape(-1), gguf.GGMLQuantizationType(int(type)))
    return values.reshape(rows, cols)


def _random_k_blocks(type: GgmlType, rows: int, cols: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    num_blocks = cols // type.block_weights
    raw = rng.integers(0, 256, (rows, num_blocks, type.block_bytes), np.uint8)
    for offset, largest in _HALVES[type]:
        halves = rng.uniform(largest / 2, largest, (rows, num_blocks, 1)).astype(np.float16)
        raw[..., offset : offset + 2] = halves.view(np.uint8)
    return raw.reshape(rows, -1)
