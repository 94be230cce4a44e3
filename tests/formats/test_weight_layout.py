"""The kernel layout of weights: exact both ways, byte for byte where the kernels look."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.weight_layout import (
    group_layout,
    packed_size_bytes,
    repack,
    row_group_extent,
    unpack,
    unpack_blocks,
    unpack_row,
)
from tests.reference.blocks import random_blocks, values_of

TYPES = sorted(SUPPORTED_TYPES)


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
    cols = max(96, 2 * type.block_weights)
    raw = random_blocks(type, rows, cols, seed=rows)
    values = values_of(type, raw, rows, cols)
    packed = repack(type, raw, rows, cols)
    assert np.array_equal(unpack(type, packed, rows, cols), values)
    for row in range(rows):
        offset, size = row_group_extent(type, rows, cols, row)
        group = packed[offset : offset + size]
        assert np.array_equal(unpack_row(type, group, cols, row % 8), values[row])


def test_q4_1_bytes_lie_where_the_kernels_read_them():
    rows, cols = 11, 64
    raw = random_blocks(GgmlType.Q4_1, rows, cols, seed=1)
    blocks = raw.reshape(rows, 2, 20)
    group = repack(GgmlType.Q4_1, raw, rows, cols)[-group_layout(GgmlType.Q4_1, cols).size_bytes :]
    row, block, dword = 10, 1, 3
    lane = row - 8
    scale_at = block * 32 + lane * 2
    assert np.array_equal(group[scale_at : scale_at + 2], blocks[row, block, 0:2])
    assert np.array_equal(group[scale_at + 16 : scale_at + 18], blocks[row, block, 2:4])
    quants_at = 64 + (block * 4 + dword) * 32 + lane * 4
    assert np.array_equal(group[quants_at : quants_at + 4], blocks[row, block, 4 + 4 * dword :][:4])


@pytest.mark.parametrize(("type", "num_words"), [(GgmlType.Q4_K, 32), (GgmlType.Q5_K, 40)])
def test_bytes_of_q4_k_and_q5_k_lie_where_the_kernels_read_them(type, num_words):
    raw = random_blocks(type, 8, 512, seed=5)
    blocks = raw.reshape(8, 2, -1)
    packed = repack(type, raw, 8, 512)
    lane, block = 5, 1
    header = packed[block * 160 : (block + 1) * 160]
    assert np.array_equal(header[2 * lane : 2 * lane + 2], blocks[lane, block, 0:2])
    assert np.array_equal(header[16 + 2 * lane : 18 + 2 * lane], blocks[lane, block, 2:4])
    assert header[32 + 2 * 3 * 8 + lane] == blocks[lane, block, 4 + 3] & 63  # scale of sub-block 3
    assert header[40 + 2 * 3 * 8 + lane] == blocks[lane, block, 8 + 3] & 63  # its minimum
    words = packed[320:].reshape(2, num_words, 8, 4)
    assert np.array_equal(words[block, :, lane].reshape(-1), blocks[lane, block, 16:])


def test_q6_k_bytes_lie_where_the_kernels_read_them():
    raw = random_blocks(GgmlType.Q6_K, 8, 512, seed=6)
    blocks = raw.reshape(8, 2, 210)
    packed = repack(GgmlType.Q6_K, raw, 8, 512)
    lane, block = 5, 1
    header = packed[block * 144 : (block + 1) * 144]
    assert np.array_equal(header[2 * lane : 2 * lane + 2], blocks[lane, block, 208:])
    assert np.array_equal(header[16 + lane :: 8], blocks[lane, block, 192:208])
    halves = packed[320:].reshape(2, 2, 24, 8, 4)[block, :, :, lane]
    assert np.array_equal(halves[:, :16].reshape(-1), blocks[lane, block, :128])
    assert np.array_equal(halves[:, 16:].reshape(-1), blocks[lane, block, 128:192])


def test_q8_0_headers_are_padded_to_a_cache_line_with_zeros():
    raw = random_blocks(GgmlType.Q8_0, 8, 32 * 5, seed=2)
    packed = repack(GgmlType.Q8_0, raw, 8, 32 * 5)
    assert group_layout(GgmlType.Q8_0, 32 * 5).header_bytes == 128  # 5 blocks x 16 bytes, rounded up
    assert not packed[80:128].any()
    assert np.array_equal(packed[128:132], raw[0, 2:6])


@pytest.mark.parametrize("type", TYPES)
def test_rows_that_pad_the_last_group_are_zero(type):
    cols = max(32, type.block_weights)
    raw = random_blocks(type, 9, cols, seed=3)
    assert not unpack(type, repack(type, raw, 9, cols), 16, cols)[9:].any()


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
