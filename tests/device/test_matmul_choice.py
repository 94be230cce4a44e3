"""The rule for launch shapes and what is tried beside it: pure, for limits of every size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.device.matmul_choice import (
    LARGE_TILE,
    SMALL_TILE,
    TILE,
    TILES,
    TOKEN_CLASSES,
    Choice,
    GpuLimits,
    candidates,
    default_choice,
    product_key,
    token_class,
)
from tests.device.products import BLOCK_TYPES, F16, Q4_1, Q8_0, Shape

LARGE_GPU = GpuLimits(compute_units=132, work_group_max=1024, local_bytes=48 * 1024)
SMALL_GPU = GpuLimits(compute_units=4, work_group_max=256, local_bytes=32 * 1024)

limits = st.builds(
    GpuLimits,
    compute_units=st.integers(1, 256),
    work_group_max=st.integers(2, 4096),
    local_bytes=st.sampled_from([8, 16, 32, 48, 64]).map(lambda kib: kib * 1024),
)
shapes = st.builds(
    lambda type, rows, blocks: Shape(type, rows, blocks * type.block_weights),
    st.sampled_from([F16, *BLOCK_TYPES]),
    st.integers(1, 300_000),
    st.integers(1, 600),
)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 1), (2, 8), (8, 8), (9, 32), (33, 128), (129, 512), (512, 512), (4000, 512)],
)
def test_classes_of_tokens(num_tokens, expected):
    assert token_class(num_tokens) == expected


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"),
    [
        (1024, 1, Choice(256)),  # few row groups: as many lanes as there are
        (4096, 1, Choice(128)),
        (151_936, 1, Choice(32)),
        (1024, 128, Choice(32)),  # 32 tiles would leave most of the device idle; 16 blocks do not
        (1024, 512, Choice(32, SMALL_TILE)),
        (3072, 512, Choice(32, TILE)),
        (4096, 512, Choice(32, LARGE_TILE)),
        (151_936, 8, Choice(32)),
        (151_936, 32, Choice(32, SMALL_TILE)),
    ],
)
def test_the_rule_on_a_large_gpu(rows, tokens, expected):
    assert default_choice(LARGE_GPU, Shape(Q8_0, rows, 3072), tokens, int8=False) == expected


def test_a_small_gpu_takes_tiles_earlier_and_fewer_lanes():
    shape = Shape(Q4_1, 1024, 1024)
    assert default_choice(SMALL_GPU, shape, 1, int8=False) == Choice(32)
    assert default_choice(SMALL_GPU, shape, 32, int8=False).tile is not None


def test_no_more_lanes_than_find_work():
    assert (
        default_choice(LARGE_GPU, Shape(Q8_0, 64, 256), 1, int8=False).lanes == 32
    )  # two loads of 4 columns
    assert default_choice(LARGE_GPU, Shape(F16, 64, 256), 1, int8=False).lanes == 128  # of one column
    assert default_choice(LARGE_GPU, Shape(Q8_0, 64, 256), 1, int8=True).lanes == 16  # 32 columns of 4 rows


@given(limits, shapes, st.sampled_from(TOKEN_CLASSES), st.booleans())
def test_every_candidate_can_run(limits, shape, tokens, int8):
    tried = candidates(limits, shape, tokens, int8=int8)
    assert tried[0] == default_choice(limits, shape, tokens, int8=int8)
    assert len(set(tried)) == len(tried) <= 1 + len(TILES) + 1
    for choice in tried:
        assert choice.lanes & (choice.lanes - 1) == 0
        assert 2 <= choice.lanes <= max(2, limits.work_group)
        assert limits.work_group % choice.lanes == 0
        if choice.tile is not None:
            assert choice.tile.lanes <= limits.work_group_max
            assert choice.tile.local_bytes <= limits.local_bytes
            assert tokens > 8


def test_matrices_of_about_as_many_rows_share_a_key():
    keys = {product_key(Shape(Q8_0, rows, 64), 8, int8=False) for rows in (1024, 1100, 2047)}
    assert len(keys) == 1
    assert product_key(Shape(Q8_0, 2048, 64), 8, int8=False) not in keys
    assert product_key(Shape(Q8_0, 1024, 64), 8, int8=True) not in keys
