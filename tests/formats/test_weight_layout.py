"""The kernel layout of weights: exact both ways, byte for byte where the kernels look."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import (
    group_layout,
    packed_size_bytes,
    repack,
    row_group_extent,
    unpack,
    unpack_blocks,
    unpack_row,
)

TYPES = [GgmlType.F32, GgmlType.F16, GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_1]


def random_blocks(type, rows, cols, seed):
    """(rows, row_bytes) uint8 of valid GGUF blocks and their values by the gguf package, (rows, cols)."""
    weights = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    quantized = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(int(type)))
    values = gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType(int(type)))
    return quantized.view(np.uint8).reshape(rows, -1), values


@st.composite
def shapes(draw):
    type = draw(st.sampled_from(TYPES))
    return type, draw(st.integers(1, 40)), draw(st.integers(1, 7)) * type.block_weights


@given(shapes(), st.integers(0, 2**32 - 1))
def test_unpack_blocks_undoes_repack(shape, seed):
    type, rows, cols = shape
    raw = np.random.default_rng(seed).integers(
        0, 256, rows * cols // type.block_weights * type.block_bytes, np.uint8
    )
    packed = repack(type, raw, rows, cols)
    assert packed.size == packed_size_bytes(type, rows, cols)
    assert packed.size % 64 == 0
    assert np.array_equal(unpack_blocks(type, packed, rows, cols).reshape(-1), raw)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("rows", [1, 8, 9, 31])
def test_values_are_those_of_the_gguf_package(type, rows):
    raw, values = random_blocks(type, rows, 96, seed=rows)
    packed = repack(type, raw, rows, 96)
    assert np.array_equal(unpack(type, packed, rows, 96), values)
    for row in range(rows):
        offset, size = row_group_extent(type, rows, 96, row)
        group = packed[offset : offset + size]
        assert np.array_equal(unpack_row(type, group, 96, row % 8), values[row])


def test_q4_1_bytes_lie_where_the_kernels_read_them():
    rows, cols = 11, 64
    raw, _ = random_blocks(GgmlType.Q4_1, rows, cols, seed=1)
    blocks = raw.reshape(rows, 2, 20)
    group = repack(GgmlType.Q4_1, raw, rows, cols)[-group_layout(GgmlType.Q4_1, cols).size_bytes :]
    row, block, dword = 10, 1, 3
    lane = row - 8
    scale_at = block * 32 + lane * 2
    assert np.array_equal(group[scale_at : scale_at + 2], blocks[row, block, 0:2])
    assert np.array_equal(group[scale_at + 16 : scale_at + 18], blocks[row, block, 2:4])
    quants_at = 64 + (block * 4 + dword) * 32 + lane * 4
    assert np.array_equal(group[quants_at : quants_at + 4], blocks[row, block, 4 + 4 * dword :][:4])


def test_q8_0_headers_are_padded_to_a_cache_line_with_zeros():
    raw, _ = random_blocks(GgmlType.Q8_0, 8, 32 * 5, seed=2)
    packed = repack(GgmlType.Q8_0, raw, 8, 32 * 5)
    assert group_layout(GgmlType.Q8_0, 32 * 5).header_bytes == 128  # 5 blocks x 16 bytes, rounded up
    assert not packed[80:128].any()
    assert np.array_equal(packed[128:132], raw[0, 2:6])


@pytest.mark.parametrize("type", TYPES)
def test_rows_that_pad_the_last_group_are_zero(type):
    raw, _ = random_blocks(type, 9, 32, seed=3)
    assert not unpack(type, repack(type, raw, 9, 32), 16, 32)[9:].any()


def test_odd_f16_columns_keep_groups_on_cache_lines():
    assert group_layout(GgmlType.F16, 5).size_bytes == 128  # 5 x 16 bytes, rounded up
    assert row_group_extent(GgmlType.F16, 17, 5, 16) == (256, 128)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: packed_size_bytes(GgmlType.Q8_0, 8, 33), "multiple of 32"),
        (lambda: packed_size_bytes(GgmlType.F16, 8, 0), "0 weights"),
        (lambda: repack(GgmlType.Q8_0, np.zeros(33, np.uint8), 1, 32), "found 33"),
        (lambda: unpack_blocks(GgmlType.Q8_0, np.zeros(34, np.uint8), 1, 32), "found 34"),
        (lambda: row_group_extent(GgmlType.F32, 8, 8, 8), "row 8"),
        (lambda: unpack_row(GgmlType.F32, np.zeros(256, np.uint8), 8, 8), "row 8"),
    ],
)
def test_wrong_sizes_are_refused(call, message):
    with pytest.raises(FormatError, match=message):
        call()


def test_a_type_without_a_layout_is_refused_by_name():
    with pytest.raises(FormatError, match="Q2_K") as refused:
        packed_size_bytes(GgmlType.Q2_K, 8, 256)
    assert refused.value.code == "unsupported_type"
