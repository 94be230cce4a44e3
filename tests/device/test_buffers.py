"""Every kernel but the matrix products where memory is buffers: offsets into them, chunks as arguments."""

import numpy as np
import pytest

from mzd.device.attention import AttentionShape
from mzd.device.elementwise import GatedMul, SoftCap
from mzd.device.embedding import Embedding
from mzd.device.rms_norm import RmsNorm
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import repack
from mzd.formats.weight_store import TensorSpec
from tests.device.attention_context import Context, largest_error
from tests.device.coherent import CoherentDevice
from tests.device.rope_case import RopeCase
from tests.device.shared_array import SharedArray
from tests.reference.model import rms_norm


@pytest.fixture(scope="module", params=["buffers", "staged"])
def memory_kind(request):
    return request.param


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def device(memory_kind, engine_device, request):
    if request.param == "cpu" and engine_device.kernel_class != "cpu":
        pytest.skip("the device has other kernels")
    device = CoherentDevice.open(engine_device.name, memory_kind=memory_kind, kernel_class=request.param)
    yield device
    device.close()


@pytest.fixture
def shared(device, request):
    return lambda values: SharedArray(device, request, np.ascontiguousarray(values))


@pytest.mark.parametrize(("num_tokens", "context"), [(1, 2600), (8, 600)])
def test_attention(device, num_tokens, context):
    shape = AttentionShape(4, 2, 32, window=2400)
    assert largest_error(Context(device, shape, num_tokens, context)) < 2e-5


def test_rope_kv(device, shared):
    RopeCase(device, shared, "pairs", 40, 200, 100, biases=True, norms=True).check()


def test_rms_norm(device, shared):
    rng = np.random.default_rng(1)
    x, weight, y = (shared(rng.standard_normal(shape, np.float32)) for shape in ((3, 70), (70,), (3, 70)))
    spec = TensorSpec("norm", GgmlType.F32, 1, 70, 0, 280)
    RmsNorm(device, spec, 1e-5, x_address=x.address, y_address=y.address).enqueue(weight.address, 3)
    device.finish()
    assert np.allclose(y.values, rms_norm(x.values.astype(np.float64), weight.values, 1e-5), atol=1e-5)


def test_elementwise(device, shared):
    z, u = np.random.default_rng(2).standard_normal((2, 700), np.float32)
    gate, up = shared(z), shared(u)
    GatedMul(device, "silu").enqueue(gate_address=gate.address, up_address=up.address, count=700)
    SoftCap(device, 2.0, x_address=up.address).enqueue(700)
    device.finish()
    assert np.allclose(gate.values, z / (1 + np.exp(-z)) * u, atol=1e-5)
    assert np.allclose(up.values, 2.0 * np.tanh(u / 2.0), atol=1e-5)


def test_embedding(device, shared):
    weights = np.random.default_rng(3).normal(0, 1, (16, 96)).astype(np.float32)
    packed = repack(GgmlType.F32, weights.view(np.uint8).reshape(-1), 16, 96)
    tokens, x = shared(np.array([15, 0, 7], np.int32)), shared(np.zeros((3, 96), np.float32))
    spec = TensorSpec("token_embd", GgmlType.F32, 16, 96, 0, len(packed))
    embedding = Embedding(device, spec, tokens_address=tokens.address, x_address=x.address)
    embedding.enqueue(shared(packed).address, 3)
    device.finish()
    assert np.array_equal(x.values, weights[tokens.values])
