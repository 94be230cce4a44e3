"""Products of the GPU class against float64, on any device: forced there by its class, slow on a CPU."""

import numpy as np
import pytest

from mzd.device import matmul_gpu
from mzd.device.matmul import Matmul
from mzd.device.matmul_choice import (
    LARGE_TILE,
    SMALL_TILE,
    TILE,
    TOKEN_CLASSES,
    Choice,
    GpuLimits,
    product_key,
)
from mzd.errors import MzdError
from tests.device.products import (
    BF16,
    BLOCK_TYPES,
    F16,
    F32,
    F32_TOLERANCE,
    INT8_TOLERANCE,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    Matrix,
    activations,
    multiply,
    relative_error,
    rounded,
)
from tests.reference.blocks import random_blocks

TYPES = {F32: 33, F16: 515, BF16: 33, Q8_0: 96, Q4_0: 64, Q4_1: 160, Q4_K: 512, Q5_K: 256, Q6_K: 512}
"""Each with its columns: of floats not whole tiles, of blocks not as many as lanes."""

SWEEP_TOKENS = (1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 255, 256, 257, 512, 513)


def name(value):
    return getattr(value, "name", None)


@pytest.fixture(autouse=True)
def gpu_class(device, monkeypatch):
    monkeypatch.setattr(device, "kernel_class", "gpu")


def chosen(shape, choice, *, int8=False):
    """The same choice for all numbers of tokens."""
    return {product_key(shape, tokens, int8=int8): choice for tokens in TOKEN_CLASSES}


def check(device, matmul, matrix, tokens, *, int8=False, accumulate=False):
    x = activations(tokens, matrix.shape.cols)
    before = activations(tokens, matrix.shape.rows, seed=2) if accumulate else np.float32(0)
    y = multiply(device, matmul, matrix, x, y_before=before if accumulate else None, accumulate=accumulate)
    expected = before + (rounded(x) if int8 else x) @ matrix.values.T
    assert relative_error(y, expected) <= F32_TOLERANCE, f"{tokens} tokens"


@pytest.mark.parametrize("type", TYPES, ids=name)
def test_products_of_every_type(device, type):
    matrix = Matrix(device, type, 41, TYPES[type])
    matmul = Matmul(device, matrix.shape, tokens_max=8)
    for tokens in (1, 8):
        check(device, matmul, matrix, tokens)
    matrix.free()


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=name)
def test_int8_products_of_every_type(device, type):
    matrix = Matrix(device, type, 41, TYPES[type])
    matmul = Matmul(device, matrix.shape, tokens_max=8, activations="int8")
    for tokens in (1, 8):
        check(device, matmul, matrix, tokens, int8=True)
    x = activations(8, matrix.shape.cols)
    assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= INT8_TOLERANCE
    matmul.free()
    matrix.free()


@pytest.mark.parametrize("activations", ["f32", "int8"])
@pytest.mark.parametrize("choice", [Choice(32), Choice(32, SMALL_TILE)], ids=["blocks", "tiles"])
def test_every_number_of_tokens(device, choice, activations):
    int8 = activations == "int8"
    matrix = Matrix(device, Q4_1, 17, 64)
    choices = chosen(matrix.shape, choice, int8=int8)
    matmul = Matmul(device, matrix.shape, tokens_max=513, activations=activations, choices=choices)
    for tokens in SWEEP_TOKENS:
        check(device, matmul, matrix, tokens, int8=int8)
    matmul.free()
    matrix.free()


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17, 49152 + 3])
def test_every_number_of_rows(device, rows):
    matrix = Matrix(device, Q8_0, rows, 96)
    matmul = Matmul(device, matrix.shape, tokens_max=9)
    for tokens in (1, 9):
        check(device, matmul, matrix, tokens)
    matrix.free()


@pytest.mark.parametrize("cols", [576, 1536, 1024, 2048, 3072, 4096])
@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_columns_of_real_models(device, cols, activations):
    matrix = Matrix(device, Q8_0, 17, cols)
    matmul = Matmul(device, matrix.shape, tokens_max=70, activations=activations)
    for tokens in (1, 8, 70):
        check(device, matmul, matrix, tokens, int8=activations == "int8")
    matmul.free()
    matrix.free()


@pytest.mark.parametrize(
    ("type", "activations", "tile"),
    [(Q6_K, "f32", TILE), (Q6_K, "int8", TILE), (Q4_1, "int8", LARGE_TILE), (F16, "f32", LARGE_TILE)],
)
def test_larger_tiles(device, type, activations, tile):
    int8 = activations == "int8"
    matrix = Matrix(device, type, 137, 256)
    choices = chosen(matrix.shape, Choice(32, tile), int8=int8)
    matmul = Matmul(device, matrix.shape, tokens_max=70, activations=activations, choices=choices)
    check(device, matmul, matrix, 70, int8=int8)
    matmul.free()
    matrix.free()


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_every_number_of_lanes_and_fewer_work_groups_than_rows_want(device, activations):
    int8 = activations == "int8"
    matrix = Matrix(device, Q4_1, 3000, 96)
    for lanes in (2, 4, 16, 64, 128, 256):
        choices = chosen(matrix.shape, Choice(lanes), int8=int8)
        matmul = Matmul(device, matrix.shape, tokens_max=8, activations=activations, choices=choices)
        for tokens in (1, 8):
            check(device, matmul, matrix, tokens, int8=int8)
        matmul.free()
    matrix.free()


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_accumulates(device, activations):
    matrix = Matrix(device, Q4_1, 41, 160)
    matmul = Matmul(device, matrix.shape, tokens_max=70, activations=activations)
    for tokens in (1, 8, 70):
        check(device, matmul, matrix, tokens, int8=activations == "int8", accumulate=True)
    matmul.free()
    matrix.free()


def test_a_device_of_narrow_limits(device, monkeypatch):
    """64 work-items and 8 KiB: no tile fits, and rounded rows of 8192 columns do not either."""
    monkeypatch.setattr(matmul_gpu, "gpu_limits", lambda device: GpuLimits(1, 64, 8192))
    matrix = Matrix(device, Q8_0, 9, 8192)
    matmul = Matmul(device, matrix.shape, tokens_max=40, activations="int8")
    for tokens in (1, 40):
        check(device, matmul, matrix, tokens, int8=True)
    matmul.free()
    matrix.free()


def test_call_sites_may_share_the_memory_of_rounded_tokens(device):
    matrices = [Matrix(device, type, 24, 96) for type in (Q8_0, Q4_1)]
    scratch = device.allocate_scratch(matmul_gpu.rounded_bytes(12, 96))
    sites = [
        Matmul(device, m.shape, tokens_max=12, activations="int8", rounded_address=scratch.address)
        for m in matrices
    ]
    for tokens in (12, 1, 4):
        for matmul, matrix in zip(sites, matrices, strict=True):
            check(device, matmul, matrix, tokens, int8=True)
    scratch.free()
    for matrix in matrices:
        matrix.free()


@pytest.mark.parametrize("fill", [0x7F, 0x80, 0xFF])
def test_int8_sums_of_extremes(device, fill):
    raw = random_blocks(Q8_0, 16, 64, seed=4).reshape(16, 2, -1)
    raw[:, :, 2:] = fill
    matrix = Matrix(device, Q8_0, 16, 64, raw=raw)
    matmul = Matmul(device, matrix.shape, tokens_max=70, activations="int8")
    for tokens, sign in ((1, 1), (1, -1), (8, -1), (70, 1)):
        x = np.full((tokens, 64), sign * 3.0, np.float32)
        assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= F32_TOLERANCE
    matmul.free()
    matrix.free()


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_int8_lets_nan_show_in_its_token_only(device, tokens):
    matrix = Matrix(device, Q4_1, 16, 64)
    matmul = Matmul(device, matrix.shape, tokens_max=tokens, activations="int8")
    x = np.zeros((tokens, 64), np.float32)
    x[-1, 40] = np.nan
    y = multiply(device, matmul, matrix, x)
    assert not y[:-1].any()
    assert not np.isfinite(y[-1]).any()
    matmul.free()
    matrix.free()


@pytest.mark.parametrize("tokens", [1, 8, 70])
def test_the_comparison_sees_a_group_that_is_off_by_one(device, tokens):
    matrix = Matrix(device, Q4_1, 32, 64)
    groups = matrix.packed.reshape(4, -1)
    groups[2:] = groups[1:3].copy()
    matmul = Matmul(device, matrix.shape, tokens_max=tokens)
    x = activations(tokens, 64)
    assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) > 0.1
    matrix.free()


def test_kernels_build_for_memory_in_buffers(device):
    weights = {"WEIGHT_Q6_K": 1, "BUFFER_PLACES": 1}
    tile = {"TILE_ROWS": 64, "TILE_TOKENS": 64, "LANE_ROWS": 8, "LANE_TOKENS": 4}
    for source, shape in (
        ("matmul_gpu", {"WORK_GROUP": 64}),
        ("matmul_int8_gpu", {"WORK_GROUP": 64}),
        ("matmul_wide_gpu", tile),
        ("matmul_wide_int8_gpu", tile),
    ):
        device.build(source, **weights, **shape)


def test_a_compiler_that_fails_at_dot_products_builds_without(device, monkeypatch):
    build, asked = device.build, []

    def build_portable(source_name, **defines):
        asked.append(defines)
        if "int8" in source_name and "PORTABLE_DOT" not in defines:
            raise MzdError("internal", "ptxas: dp4a requires .target sm_61")
        return build(source_name, **defines)

    monkeypatch.setattr(device, "build", build_portable)
    matrix = Matrix(device, Q8_0, 17, 96)
    matmul = Matmul(device, matrix.shape, tokens_max=1, activations="int8")
    check(device, matmul, matrix, 1, int8=True)
    assert len(asked) == 2
    matrix.free()
