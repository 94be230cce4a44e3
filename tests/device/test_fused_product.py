"""Products of one token with the norm or the gate before them in the same launch, against float64."""

import numpy as np
import pytest

from mzd.device.matmul_cpu import FusedCpuProduct
from tests.device.products import (
    BF16,
    F16,
    F32,
    F32_TOLERANCE,
    GUARD,
    K_TYPES,
    Q4_0,
    Q4_1,
    Q8_0,
    Matrix,
    activations,
    relative_error,
    rounded,
)
from tests.reference.model import gelu_tanh, rms_norm, silu

pytestmark = pytest.mark.usefixtures("with_cpu_kernels")

EPS = 1e-5
FLIPS_TOLERANCE = 2e-3
"""Where float32 rounds an activation to another of 255 steps than float64: one or two of a token."""

FLOAT_SHAPES = [
    (type, rows, cols) for type in (F32, F16, BF16) for rows, cols in ((1, 1), (9, 33), (40, 515))
]
BLOCK_SHAPES = [(type, rows, cols) for type in (Q8_0, Q4_0, Q4_1) for rows, cols in ((9, 96), (192, 576))]
BLOCK_SHAPES += [(type, 41, 768) for type in K_TYPES]


def id_of(value):
    return getattr(value, "name", value)


class Product:
    """One launch: y between guards, x with what it is normed or multiplied by."""

    def __init__(self, device, matrix, kind, **how):
        self.device, self.matrix, self.kind = device, matrix, kind
        self.x, self.other = activations(1, matrix.shape.cols), activations(1, matrix.shape.cols, seed=2)
        norm_eps = EPS if kind == "norm" else None
        activation = "silu" if kind == "norm" else kind
        self.product = FusedCpuProduct(device, matrix.shape, norm_eps=norm_eps, activation=activation, **how)

    @property
    def multiplied(self):
        """What the matrix multiplies, (1, cols) float64."""
        x = self.x.astype(np.float64)
        if self.kind == "norm":
            return rms_norm(x, self.other[0], EPS)
        return {"silu": silu, "gelu_tanh": gelu_tanh}[self.kind](x) * self.other

    def run(self, *, before=np.nan, accumulate=False):
        rows = self.matrix.shape.rows
        inputs = self.device.allocate_scratch(2 * self.x.nbytes)
        inputs.view(np.float32, (2, self.x.size))[:] = np.concatenate([self.x, self.other])
        output = self.device.allocate_scratch(4 * (rows + 2))
        y = output.view(np.float32, (rows + 2,))
        y[:] = before
        y[0] = y[-1] = GUARD
        self.product.enqueue(
            weights_address=self.matrix.address,
            x_address=inputs.address,
            other_address=inputs.address + self.x.nbytes,
            y_address=output.address + 4,
            accumulate=accumulate,
        )
        self.device.finish()
        assert y[0] == y[-1] == GUARD
        result = y[1:-1].copy()
        inputs.free()
        output.free()
        return result


@pytest.mark.parametrize("kind", ["norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("type", "rows", "cols"), FLOAT_SHAPES + BLOCK_SHAPES, ids=id_of)
def test_exact(device, type, rows, cols, kind):
    matrix = Matrix(device, type, rows, cols)
    product = Product(device, matrix, kind, activations="f32")
    expected = product.multiplied @ matrix.values.T
    assert relative_error(product.run(), expected[0]) <= F32_TOLERANCE
    before = np.linspace(-1, 1, rows + 2).astype(np.float32)
    added = product.run(before=before, accumulate=True)
    assert relative_error(added, expected[0] + before[1:-1]) <= F32_TOLERANCE
    matrix.free()


@pytest.mark.parametrize("kind", ["norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize(("type", "rows", "cols"), BLOCK_SHAPES, ids=id_of)
def test_rounded(device, type, rows, cols, kind):
    """What is rounded is the norm, or the gated product, not x."""
    matrix = Matrix(device, type, rows, cols)
    product = Product(device, matrix, kind, activations="int8")
    expected = rounded(product.multiplied.astype(np.float32)) @ matrix.values.T
    assert relative_error(product.run(), expected[0]) <= FLIPS_TOLERANCE
    matrix.free()


def test_types_without_blocks_stay_exact(device):
    matrix = Matrix(device, F16, 9, 64)
    product = Product(device, matrix, "norm", activations="int8")
    assert relative_error(product.run(), (product.multiplied @ matrix.values.T)[0]) <= F32_TOLERANCE
    matrix.free()


@pytest.mark.parametrize("kind", ["norm", "silu"])
def test_large_values_stay_finite(device, kind):
    """A gate far below zero is zero, far above itself; a norm of large numbers does not overflow."""
    matrix = Matrix(device, Q8_0, 16, 64)
    product = Product(device, matrix, kind, activations="f32")
    product.x *= 200
    assert relative_error(product.run(), (product.multiplied @ matrix.values.T)[0]) <= F32_TOLERANCE
    matrix.free()
