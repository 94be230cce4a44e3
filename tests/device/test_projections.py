"""Several matrices over the same x: joined for one token, apart for more, the same numbers either way."""

import gguf
import numpy as np
import pytest

from mzd.device.block_input import BlockInput
from mzd.device.product_plan import ProductPlan
from mzd.device.projections import Projections, join_rows
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import packed_size_bytes, repack, unpack
from mzd.formats.weight_store import TensorSpec
from tests.reference.model import rms_norm

COLS = 96
NORM = TensorSpec("norm", GgmlType.F32, 1, COLS, 0, 4 * COLS)
EPS = 1e-5


def specs_of(*matrices):
    """Specs of (type, rows) that follow each other as a unit lays them out."""
    specs, offset = [], NORM.size_bytes + 128
    for i, (type, rows) in enumerate(matrices):
        size = packed_size_bytes(type, rows, COLS)
        specs.append(TensorSpec(f"m{i}", type, rows, COLS, offset, size))
        offset += size
    return specs


Q8, Q4 = GgmlType.Q8_0, GgmlType.Q4_0


@pytest.mark.parametrize(
    ("matrices", "joined_rows"),
    [
        ([(Q8, 16), (Q8, 8), (Q8, 8)], [32]),
        ([(Q8, 16), (Q8, 8), (Q4, 8)], [24, 8]),
        ([(Q8, 12), (Q8, 8), (Q8, 3)], [12, 11]),
        ([(Q8, 8), (Q4, 8), (Q8, 8)], [8, 8, 8]),
    ],
)
def test_join_rows(matrices, joined_rows):
    joined = join_rows(specs_of(*matrices))
    assert [spec.rows for spec in joined] == joined_rows
    assert all(spec.size_bytes == packed_size_bytes(spec.type, spec.rows, COLS) for spec in joined)


def test_a_gap_is_not_joined():
    first, second = specs_of((Q8, 8), (Q8, 8))
    moved = TensorSpec("m1", Q8, 8, COLS, second.offset_bytes + 64, second.size_bytes)
    assert len(join_rows([first, moved])) == 2


@pytest.mark.parametrize("matrices", [[(Q8, 16), (Q8, 8), (Q8, 11)], [(Q8, 12), (Q4, 8), (Q4, 3)]])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize("norm", [None, NORM])
def test_products_lie_behind_each_other(device, matrices, num_tokens, norm):
    specs = specs_of(*matrices)
    rng = np.random.default_rng(1)
    unit = device.allocate_scratch(specs[-1].offset_bytes + specs[-1].size_bytes)
    weights = []
    for spec in specs:
        values = rng.normal(0, 1, (spec.rows, COLS)).astype(np.float32)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[spec.type.name])
        packed = repack(spec.type, np.ascontiguousarray(raw).view(np.uint8), spec.rows, COLS)
        unit.view(np.uint8, packed.shape, offset_bytes=spec.offset_bytes)[:] = packed
        weights.append(unpack(spec.type, packed, spec.rows, COLS))
    norm_weights = unit.view(np.float32, (COLS,))
    norm_weights[:] = rng.normal(1, 0.1, COLS)
    x, normed, y = (device.allocate_scratch(4 * 9 * count) for count in (COLS, COLS, 64))
    x_values = rng.normal(0, 1, (num_tokens, COLS)).astype(np.float32)
    x.view(np.float32, x_values.shape)[:] = x_values
    source = BlockInput(device, x_address=x.address, norm=norm, eps=EPS, normed_address=normed.address)
    projections = Projections(
        device, specs, source, y_address=y.address, tokens_max=9, products=ProductPlan()
    )
    projections.enqueue(unit.address, num_tokens)
    device.finish()
    expected = x_values if norm is None else rms_norm(x_values, norm_weights, EPS)
    for i, (spec, matrix) in enumerate(zip(specs, weights, strict=True)):
        offset = projections.output_address(i, num_tokens) - y.address
        result = y.view(np.float32, (num_tokens, spec.rows), offset_bytes=offset)
        assert np.allclose(result, expected @ matrix.T, atol=1e-4)
    for buffer in (unit, x, normed, y):
        buffer.free()
