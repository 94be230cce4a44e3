"""Owns the element types of GGUF tensors: their numbers in the file and the size of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class GgmlType(IntEnum):
    """A tensor's element type; the value is its number in the file.

    Quantised types store rows in blocks: `block_weights` weights in `block_bytes` bytes. Types that the
    engine cannot compute are listed too, so that a refusal can name them.

    Source: ggml.h, `enum ggml_type`; numbers that are missing were removed from the format.
    """

    block_weights: int
    block_bytes: int

    def __new__(cls, number: int, block_weights: int, block_bytes: int) -> GgmlType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.block_weights = block_weights
        member.block_bytes = block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` weights, a multiple of `block_weights`."""
        return cols // self.block_weights * self.block_bytes


# What the importer takes; each has a dequantiser, a kernel layout and kernels.
SUPPORTED_TYPES = frozenset(
    {
        GgmlType.F32,
        GgmlType.F16,
        GgmlType.BF16,
        GgmlType.Q8_0,
        GgmlType.Q4_0,
        GgmlType.Q4_1,
        GgmlType.Q4_K,
        GgmlType.Q5_K,
        GgmlType.Q6_K,
    }
)

TYPES_BY_NUMBER: Mapping[int, GgmlType] = {int(member): member for member in GgmlType}
