"""The small kernels against float64: norm, SiLU, RoPE with the K and V write, embedding rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.device.attention import AttentionTarget
from mzd.device.elementwise import GatedMul, SoftCap
from mzd.device.embedding import Embedding
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import RopeAngles
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.layer_config import RopeConfig
from mzd.formats.weight_layout import repack, unpack
from mzd.formats.weight_store import TensorSpec
from tests.device.rope_case import RopeCase
from tests.device.shared_array import SharedArray
from tests.reference.blocks import random_blocks
from tests.reference.model import gelu_tanh, rms_norm


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def kernel_class(request, device, monkeypatch):
    """Each class of kernels in turn."""
    monkeypatch.setattr(device, "kernel_class", request.param)
    return request.param


@pytest.fixture
def shared(device, request):
    """A function that puts an array into shared memory."""
    return lambda values: SharedArray(device, request, np.ascontiguousarray(values))


@pytest.mark.parametrize("cols", [1, 5, 8, 64, 576, 1001])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_rms_norm(device, shared, cols, num_tokens):
    rng = np.random.default_rng(cols)
    x = shared(rng.normal(0, 30, (num_tokens, cols)).astype(np.float32))
    weight = shared(rng.normal(1, 0.3, cols).astype(np.float32))
    y = shared(np.zeros_like(x.values))
    spec = TensorSpec("norm", GgmlType.F32, 1, cols, 0, 4 * cols)
    norm = RmsNorm(device, spec, 1e-5, x_address=x.address, y_address=y.address)
    norm.enqueue(weight.address, num_tokens)
    device.finish()
    expected = rms_norm(x.values.astype(np.float64), weight.values, 1e-5)
    assert np.abs(y.values - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("cols", [5, 64])
def test_rms_norm_added(device, shared, cols):
    rng = np.random.default_rng(cols)
    x, y = (shared(rng.normal(0, 3, (4, cols)).astype(np.float32)) for _ in "xy")
    weight = shared(rng.normal(1, 0.3, cols).astype(np.float32))
    expected = y.values[:3] + rms_norm(x.values[1:].astype(np.float64), weight.values, 1e-6)
    spec = TensorSpec("norm", GgmlType.F32, 1, cols, 0, 4 * cols)
    norm = RmsNorm(device, spec, 1e-6, x_address=x.address, y_address=y.address, accumulate=True)
    norm.enqueue(weight.address, 3, first_row=1)
    device.finish()
    assert np.abs(y.values[:3] - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("count", [1, 7, 512, 513, 3 * 512 + 100])
def test_silu_mul(device, shared, count):
    rng = np.random.default_rng(count)
    gate_before = rng.normal(0, 8, count).astype(np.float32)
    gate_before[: min(count, 6)] = [-200.0, 200.0, -88.0, 0.0, -1e30, 1e30][: min(count, 6)]
    gate, up = shared(gate_before), shared(rng.normal(0, 1, count).astype(np.float32))
    GatedMul(device, "silu").enqueue(gate_address=gate.address, up_address=up.address, count=count)
    device.finish()
    z = gate_before.astype(np.float64)
    expected = z * np.exp(-np.logaddexp(0, -z)) * up.values
    assert np.allclose(gate.values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 7, 513, 3 * 512 + 100])
def test_gelu_mul(device, shared, count):
    rng = np.random.default_rng(count)
    gate_before = rng.normal(0, 4, count).astype(np.float32)
    gate_before[: min(count, 6)] = [-200.0, 200.0, -5.5, 0.0, -1e30, 1e30][: min(count, 6)]
    gate, up = shared(gate_before), shared(rng.normal(0, 1, count).astype(np.float32))
    GatedMul(device, "gelu_tanh").enqueue(gate_address=gate.address, up_address=up.address, count=count)
    device.finish()
    expected = gelu_tanh(gate_before.astype(np.float64)) * up.values
    assert np.allclose(gate.values, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("count", [3, 512, 1300])
@pytest.mark.parametrize("cap", [4.0, 30.0])
def test_soft_cap(device, shared, count, cap):
    before = np.random.default_rng(count).normal(0, 2 * cap, count).astype(np.float32)
    before[:3] = -1e30, 0.0, 1e30
    x = shared(before)
    SoftCap(device, cap, x_address=x.address).enqueue(count)
    device.finish()
    assert np.abs(x.values - cap * np.tanh(before.astype(np.float64) / cap)).max() < 1e-6 * cap


@pytest.mark.parametrize("style", ["pairs", "halves"])
@pytest.mark.parametrize("dims", [24, 40])
@pytest.mark.parametrize(("position", "num_tokens"), [(0, 1), (31, 2), (250, 20), (256, 1), (700, 100)])
def test_rope_kv(device, shared, style, dims, position, num_tokens):
    RopeCase(device, shared, style, dims, position, num_tokens).check()


@pytest.mark.parametrize(("position", "num_tokens"), [(0, 1), (255, 2), (200, 513)])
@pytest.mark.usefixtures("with_shared_memory")
def test_chunks_as_arguments(device, shared, position, num_tokens):
    target = replace(AttentionTarget.of(device), chunk_arguments=True)
    RopeCase(device, shared, "halves", 40, position, num_tokens, target=target).check()


@pytest.mark.parametrize(("biases", "norms"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dims", [0, 24])
def test_biases_and_norms_come_before_the_rotation(device, shared, biases, norms, dims):
    RopeCase(device, shared, "halves", dims, 250, 20, biases=biases, norms=norms).check()


def test_rope_kv_saturates(device, shared):
    """What float16 cannot hold becomes its largest number: an infinity times a zero weight is NaN."""
    case = RopeCase(device, shared, "pairs", 40, 3, 1)
    case.v_before[:] = 1e6
    case.v_before[:, 1] = -1e6
    case.launch(device, shared)
    _, v = case.kv()
    assert (v[3, 0] == np.float16(65504)).all()
    assert (v[3, 1] == np.float16(-65504)).all()


@given(st.integers(0, 130_000), st.floats(100, 1e7))
def test_angles_are_exact_far_out(position, base):
    angles = np.zeros((2, 2, 16), np.float32)
    RopeAngles(RopeConfig("pairs", base, 32, None)).write(angles, position)
    turn = np.array([position, position + 1])[:, None] * base ** (-np.arange(0, 32, 2) / 32)
    assert np.allclose(angles[:, 0], np.cos(turn), atol=1e-7)
    assert np.allclose(angles[:, 1], np.sin(turn), atol=1e-7)


@pytest.mark.parametrize("type", sorted(SUPPORTED_TYPES), ids=lambda type: type.name)
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_embedding_rows(device, shared, type, num_blocks):
    rows, cols = 21, num_blocks * max(32, type.block_weights)
    packed = repack(type, random_blocks(type, rows, cols, seed=cols), rows, cols)
    tokens = np.array([20, 0, 7, 8, 8, 15], np.int32)
    spec = TensorSpec("token_embd", type, rows, cols, 0, len(packed))
    x = shared(np.zeros((len(tokens), cols), np.float32))
    embedding = Embedding(device, spec, tokens_address=shared(tokens).address, x_address=x.address)
    embedding.enqueue(shared(packed).address, len(tokens))
    device.finish()
    expected = unpack(type, packed, rows, cols)[tokens]
    assert np.allclose(x.values, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


def test_embedding_rows_scaled(device, shared):
    weights = np.random.default_rng(1).normal(0, 1, (16, 96)).astype(np.float32)
    packed = repack(GgmlType.F32, weights.view(np.uint8).reshape(-1), 16, 96)
    tokens = np.array([15, 0, 7], np.int32)
    spec = TensorSpec("token_embd", GgmlType.F32, 16, 96, 0, len(packed))
    x = shared(np.zeros((3, 96), np.float32))
    addresses = {"tokens_address": shared(tokens).address, "x_address": x.address}
    Embedding(device, spec, **addresses, scale=5.5).enqueue(shared(packed).address, 3)
    device.finish()
    assert np.allclose(x.values, 5.5 * weights[tokens], rtol=1e-6)


def test_embedding_rows_of_bfloat16_keep_every_bit(device, shared):
    """Subnormal ones too, though kernels count those as zero."""
    rows, cols = 8, 32
    raw = np.random.default_rng(3).integers(0, 1 << 16, rows * cols).astype(np.uint16)
    raw[:8] = [1, 0x8001, 0x7F, 0x80, 0x7F7F, 0xFF80, 0, 0x8000]
    packed = repack(GgmlType.BF16, raw.view(np.uint8), rows, cols)
    tokens = np.arange(rows, dtype=np.int32)
    spec = TensorSpec("token_embd", GgmlType.BF16, rows, cols, 0, len(packed))
    x = shared(np.zeros((rows, cols), np.float32))
    embedding = Embedding(device, spec, tokens_address=shared(tokens).address, x_address=x.address)
    embedding.enqueue(shared(packed).address, rows)
    device.finish()
    assert np.array_equal(x.values.view(np.uint32).reshape(-1), raw.astype(np.uint32) << 16)
