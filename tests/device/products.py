"""Owns one matrix product under test: a matrix in device memory, a launch between guards, the reference."""

from dataclasses import dataclass

import numpy as np

from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import repack, unpack
from tests.reference.blocks import random_blocks

F32_TOLERANCE = 5e-6
INT8_TOLERANCE = 1e-2
GUARD_FLOATS = 64
GUARD = np.float32(12345.0)

F32, F16, BF16 = FLOATS = GgmlType.F32, GgmlType.F16, GgmlType.BF16
Q8_0, Q4_0, Q4_1 = GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_1
K_TYPES = Q4_K, Q5_K, Q6_K = GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K
BLOCK_TYPES = (Q8_0, Q4_0, Q4_1, *K_TYPES)


@dataclass(frozen=True)
class Shape:
    type: GgmlType
    rows: int
    cols: int


class Matrix:
    """Packed weights in shared memory, random unless given as GGUF blocks, with their exact values."""

    def __init__(self, device, type, rows, cols, *, seed=0, raw=None):
        raw = random_blocks(type, rows, cols, seed) if raw is None else raw
        packed = repack(type, raw, rows, cols)
        self.shape = Shape(type, rows, cols)
        self.values = unpack(type, packed, rows, cols).astype(np.float64)
        self._scratch = device.allocate_scratch(packed.size)
        self.packed = self._scratch.view(np.uint8, (packed.size,))
        self.packed[:] = packed
        self.address = self._scratch.address

    def free(self):
        self._scratch.free()


def multiply(device, matmul, matrix, x, *, y_before=None, accumulate=False):
    """Run one product; y lies between guards, which have to survive. Returns (tokens, rows) float32."""
    tokens, rows = len(x), matrix.shape.rows
    x_scratch = device.allocate_scratch(x.nbytes)
    x_scratch.view(np.float32, x.shape)[:] = x
    y_scratch = device.allocate_scratch(4 * (tokens * rows + 2 * GUARD_FLOATS))
    around = y_scratch.view(np.float32, (tokens * rows + 2 * GUARD_FLOATS,))
    around[:] = GUARD
    y = around[GUARD_FLOATS:-GUARD_FLOATS].reshape(tokens, rows)
    y[:] = np.nan if y_before is None else y_before
    matmul.enqueue(
        weights_address=matrix.address,
        x_address=x_scratch.address,
        y_address=y_scratch.address + 4 * GUARD_FLOATS,
        num_tokens=tokens,
        accumulate=accumulate,
    )
    device.finish()
    result = y.copy()
    assert (around[:GUARD_FLOATS] == GUARD).all()
    assert (around[-GUARD_FLOATS:] == GUARD).all()
    x_scratch.free()
    y_scratch.free()
    return result


def relative_error(y, expected):
    """max |dy| / max |y|; NaN wherever y is NaN, so that comparisons fail."""
    return np.abs(y - expected).max() / np.abs(expected).max()


def rounded(x):
    """x as the int8 path sees it: blocks of 32, each a scale of max |x| / 127 times integers."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.where(largest > 0, 127 / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    exact = blocks.astype(np.float64) * inverse.astype(np.float64)  # as a fused multiplication has it
    return (np.rint(exact) * largest / 127).reshape(x.shape)


def activations(tokens, cols, seed=1):
    return np.random.default_rng(seed).standard_normal((tokens, cols)).astype(np.float32)
