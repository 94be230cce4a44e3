"""Matrix kernels against float64 products of the same weights, at shapes that have tails everywhere."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from mzd.device.matmul import Matmul
from mzd.errors import FormatError
from mzd.formats.ggml_types import GgmlType
from tests.device.products import (
    BF16,
    F16,
    F32,
    F32_TOLERANCE,
    INT8_TOLERANCE,
    K_TYPES,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_0,
    Matrix,
    Shape,
    activations,
    multiply,
    relative_error,
    rounded,
)
from tests.reference.blocks import random_blocks

TOKENS = [1, 2, 3, 7, 8, 9, 31, 128, 130]
SHAPES = [
    *[(type, rows, cols) for type in (Q8_0, Q4_0, Q4_1) for rows, cols in ((1, 32), (9, 96), (24, 64))],
    *[(type, rows, cols) for type in (F32, F16, BF16) for rows, cols in ((1, 1), (9, 33), (40, 515))],
    *[(type, rows, cols) for type in K_TYPES for rows, cols in ((1, 256), (9, 256), (41, 768))],
    (Q8_0, 8, 576),
    (Q4_0, 72, 1536),
    (Q4_1, 192, 576),
    (Q4_1, 576, 1536),
    (F16, 17, 576),
]


class NarrowDevice:
    """The same device with kernels built for narrower registers than it has."""

    kernel_class = "cpu"

    def __init__(self, device, vector_bytes):
        if device.kernel_class != "cpu":
            pytest.skip("only kernels of the CPU class are built for a width of registers")
        self.compute_units = device.compute_units
        self.kernel = device.kernel
        self._device, self._vector_bytes = device, vector_bytes

    def build(self, source_name, **defines):
        return self._device.build(source_name, VECTOR_BYTES=self._vector_bytes, **defines)


def vector_widths():
    """Register widths that this machine's compiler can build for, its own left out."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return [16, *([32] if "avx2" in flags else [])]


@pytest.mark.parametrize(("type", "rows", "cols"), SHAPES, ids=lambda value: getattr(value, "name", value))
def test_products_match_float64(device, type, rows, cols):
    matrix = Matrix(device, type, rows, cols)
    matmul = Matmul(device, matrix.shape, tokens_max=max(TOKENS))
    for tokens in TOKENS:
        x = activations(tokens, cols)
        y = multiply(device, matmul, matrix, x)
        assert relative_error(y, x @ matrix.values.T) <= F32_TOLERANCE, f"{tokens} tokens"
    matrix.free()


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_accumulate_adds_to_what_is_there(device, tokens):
    matrix = Matrix(device, Q4_1, 41, 576)  # 576 columns: two whole tiles and a partial one
    matmul = Matmul(device, matrix.shape, tokens_max=tokens)
    x, before = activations(tokens, 576), activations(tokens, 41, seed=2)
    y = multiply(device, matmul, matrix, x, y_before=before, accumulate=True)
    assert relative_error(y, before + x @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()


def test_a_vocabulary_of_rows(device):
    matrix = Matrix(device, Q8_0, 49152, 576)
    matmul = Matmul(device, matrix.shape, tokens_max=9)
    for tokens in (1, 2, 9):
        x = activations(tokens, 576)
        assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()


def test_one_call_site_serves_changing_matrices_and_token_counts(device):
    matrices = [Matrix(device, Q8_0, 24, 64, seed=seed) for seed in range(3)]
    matmul = Matmul(device, matrices[0].shape, tokens_max=16)
    for tokens, matrix in zip((16, 1, 3, 1, 16), matrices + matrices, strict=False):
        x = activations(tokens, 64)
        assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= F32_TOLERANCE
    for matrix in matrices:
        matrix.free()


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_the_comparison_sees_a_group_that_is_off_by_one(device, tokens):
    matrix = Matrix(device, Q4_1, 32, 64)
    matmul = Matmul(device, matrix.shape, tokens_max=tokens)
    groups = matrix.packed.reshape(4, -1)
    groups[2:] = groups[1:3].copy()
    x = activations(tokens, 64)
    assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) > 0.1
    matrix.free()


def test_no_tokens_enqueue_nothing_and_too_many_are_refused(device):
    matmul = Matmul(device, Shape(F32, 8, 8), tokens_max=4)
    nowhere = {"weights_address": 0, "x_address": 0, "y_address": 0}
    matmul.enqueue(**nowhere, num_tokens=0)
    with pytest.raises(ValueError, match="5 tokens, at most 4"):
        matmul.enqueue(**nowhere, num_tokens=5)


def test_types_without_kernels_are_refused(device):
    with pytest.raises(FormatError, match="Q2_K"):
        Matmul(device, Shape(GgmlType.Q2_K, 8, 256), tokens_max=1)


INT8_SHAPES = [
    *itertools.product([Q8_0, Q4_0, Q4_1], [(1, 32), (9, 96), (24, 64), (192, 576), (72, 1536)]),
    *itertools.product(K_TYPES, [(1, 256), (24, 512), (41, 768)]),
]


@pytest.mark.parametrize(("type", "shape"), INT8_SHAPES, ids=lambda value: getattr(value, "name", value))
def test_int8_products_match_float64_of_rounded_activations(device, type, shape):
    rows, cols = shape
    matrix = Matrix(device, type, rows, cols)
    matmul = Matmul(device, matrix.shape, tokens_max=max(TOKENS), activations="int8")
    for tokens in TOKENS:
        x = activations(tokens, cols)
        y = multiply(device, matmul, matrix, x)
        assert relative_error(y, rounded(x) @ matrix.values.T) <= F32_TOLERANCE, f"{tokens} tokens"
        assert relative_error(y, x @ matrix.values.T) <= INT8_TOLERANCE, f"{tokens} tokens"
    matrix.free()


QUANT_BYTES = {Q8_0: slice(2, 34), Q4_0: slice(2, 18), Q4_1: slice(4, 20)}
QUANT_BYTES |= {Q4_K: slice(16, 144), Q5_K: slice(16, 176), Q6_K: slice(0, 192)}


@pytest.mark.parametrize("type", QUANT_BYTES, ids=lambda type: type.name)
@pytest.mark.parametrize("fill", [0x7F, 0x80, 0xFF])
def test_int8_sums_do_not_overflow(device, type, fill):
    cols = 2 * type.block_weights
    raw = random_blocks(type, 16, cols, seed=4).reshape(16, 2, -1)
    raw[:, :, QUANT_BYTES[type]] = fill  # all quants at one end
    matrix = Matrix(device, type, 16, cols, raw=raw)
    matmul = Matmul(device, matrix.shape, tokens_max=9, activations="int8")
    for tokens, sign in ((1, 1), (1, -1), (9, 1), (9, -1)):
        x = np.full((tokens, cols), sign * 3.0, np.float32)
        assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()


def test_int8_rounds_zeros_to_zeros_and_lets_nan_show(device):
    matrix = Matrix(device, Q4_1, 16, 64)
    matmul = Matmul(device, matrix.shape, tokens_max=3, activations="int8")
    x = np.zeros((3, 64), np.float32)
    x[1, 40], x[2, 40] = np.nan, np.inf
    y = multiply(device, matmul, matrix, x)
    assert not y[0].any()
    assert not np.isfinite(y[1:]).any()
    matrix.free()


@pytest.mark.parametrize("tokens", [1, 20])
def test_int8_accumulates(device, tokens):
    matrix = Matrix(device, Q8_0, 41, 96)
    matmul = Matmul(device, matrix.shape, tokens_max=tokens, activations="int8")
    x, before = activations(tokens, 96), activations(tokens, 41, seed=2)
    y = multiply(device, matmul, matrix, x, y_before=before, accumulate=True)
    assert relative_error(y, before + rounded(x) @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()


def test_int8_leaves_float_weights_exact(device):
    matrix = Matrix(device, F16, 40, 96)
    matmul = Matmul(device, matrix.shape, tokens_max=5, activations="int8")
    x = activations(5, 96)
    assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()


def test_int8_serves_rows_whose_rounded_tokens_fill_local_memory(device):
    matrix = Matrix(device, Q8_0, 16, 14336)
    matmul = Matmul(device, matrix.shape, tokens_max=20, activations="int8")
    x = activations(20, 14336)
    assert relative_error(multiply(device, matmul, matrix, x), rounded(x) @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()


@pytest.mark.parametrize("vector_bytes", vector_widths())
@pytest.mark.parametrize("type", [Q8_0, Q4_0, Q4_1, *K_TYPES], ids=lambda type: type.name)
def test_int8_has_the_same_bits_for_every_register_width(device, type, vector_bytes):
    cols = max(96, type.block_weights)
    matrix = Matrix(device, type, 41, cols)
    native = Matmul(device, matrix.shape, tokens_max=11, activations="int8")
    narrow = Matmul(NarrowDevice(device, vector_bytes), matrix.shape, tokens_max=11, activations="int8")
    for tokens in (1, 3, 11):
        x = activations(tokens, cols)
        y = multiply(device, narrow, matrix, x)
        assert y.tobytes() == multiply(device, native, matrix, x).tobytes()
    matrix.free()


@pytest.mark.parametrize(("type", "cols"), [(Q4_1, 288), (Q6_K, 512), (BF16, 33)])
def test_exact_products_on_narrow_registers(device, type, cols):
    matrix = Matrix(device, type, 41, cols)
    matmul = Matmul(NarrowDevice(device, 16), matrix.shape, tokens_max=70)
    for tokens in (1, 3, 8, 70):
        x = activations(tokens, cols)
        assert relative_error(multiply(device, matmul, matrix, x), x @ matrix.values.T) <= F32_TOLERANCE
    matrix.free()
