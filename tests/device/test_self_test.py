"""The self-test passes on a device that is right, and names the kernel of one that is not."""

from dataclasses import replace
from pathlib import Path

import pytest

import mzd.device.opencl
from mzd.device.opencl import OpenClDevice
from mzd.device.scratch import MirroredScratch
from mzd.device.selection import MEMORY_KINDS
from mzd.device.self_test import self_test
from mzd.errors import MzdError
from mzd.kernels import kernel_source
from tests.reference.model import pack_units, read_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = ["llama2l-F32", "llama-F16", "llama-BF16", "llama-Q8_0", "llama-Q4_0", "llama-Q4_1"]
FILES += ["llamawide-Q4_K", "llamawide-Q5_K", "llamawide-Q6_K"]


@pytest.fixture(scope="module", params=FILES)
def index(request):
    return pack_units(read_model(FIXTURES / f"{request.param}.gguf"))[0]


@pytest.fixture
def llama():
    """An index with quantised matrices."""
    return pack_units(read_model(FIXTURES / "llama-Q4_1.gguf"))[0]


def broken(source, right, wrong):
    """`kernel_source`, with something wrong in one source."""

    def read(name):
        text = kernel_source(name)
        assert name != source or right in text
        return text.replace(right, wrong) if name == source else text

    return read


@pytest.mark.parametrize("activations", ["f32", "int8"])
def test_passes(device, index, activations):
    self_test(device, index, activations=activations)


# Of the GPU's kernels there are three: with pointers, with buffers, and with chunks as arguments.
WAYS = [*((kind, "cpu") for kind in MEMORY_KINDS), *((kind, "gpu") for kind in MEMORY_KINDS[1:])]


@pytest.mark.usefixtures("with_cpu_kernels")
@pytest.mark.parametrize(("memory_kind", "kernel_class"), WAYS)
def test_passes_in_every_kind_of_memory_with_every_class_of_kernels(device, llama, memory_kind, kernel_class):
    device = OpenClDevice.open(device.name, memory_kind=memory_kind, kernel_class=kernel_class)
    self_test(device, llama, activations="f32")
    device.close()


@pytest.mark.parametrize("memory_kind", ["staged", "coarse_svm"])
def test_a_missed_upload_shows(llama, monkeypatch, memory_kind):
    """What the host writes does reach the device only through `upload`, even on a device that is the host."""
    monkeypatch.setattr(MirroredScratch, "upload", lambda *_: None)
    device = OpenClDevice.open(memory_kind=memory_kind)
    with pytest.raises(MzdError, match="the device computes"):
        self_test(device, llama, activations="f32")
    device.close()


ARCHITECTURE_FILES = ["qwen2-F16", "qwen3-F16", "exaone4hybrid-F16", "gemma2-F16", "gemma3-F16"]


@pytest.mark.parametrize("file", ARCHITECTURE_FILES)
def test_passes_for_every_architecture(device, file):
    self_test(device, pack_units(read_model(FIXTURES / f"{file}.gguf"))[0], activations="f32")


def test_passes_for_the_caps_and_windows_of_real_models(device):
    index = pack_units(read_model(FIXTURES / "gemma2-F16.gguf"))[0]
    layers = tuple(replace(layer, window=layer.window and 4096) for layer in index.config.layers)
    config = replace(index.config, layers=layers, attention_softcap=50.0, head_dim=256)
    self_test(device, replace(index, config=config), activations="f32")


@pytest.mark.usefixtures("with_cpu_kernels")
@pytest.mark.parametrize(
    ("file", "source", "right", "wrong", "kernel"),
    [
        ("gemma2-F16", "norm", "vload8(0, y) + (v)", "(v)", "rms_norm, accumulated"),
        ("gemma2-F16", "elementwise", "0.044715f", "0.04f", "gated_mul, gelu_tanh"),
        ("gemma2-F16", "elementwise", "cap - 2.0f * cap", "cap - 1.99f * cap", "soft_cap"),
        ("gemma2-F16", "embedding", "to[c] *= SCALE", "to[c] *= 2.0f", "embed, F16"),
        ("gemma2-F16", "attention", "capped(loadv(v, score))", "loadv(v, score)", "attention, 11 tokens"),
        ("gemma2-F16", "attention", "(limit) - WINDOW", "(limit) - WINDOW - 1", "attention, 11 tokens"),
        ("gemma3-F16", "rope", "QK_NORM_EPS);", "0.1f);", "rope_kv, q"),
        ("qwen2-F16", "rope", "add_bias(q, q_bias", "add_bias(q, k_bias", "rope_kv, q"),
        ("qwen2-F16", "rope", "add_bias(v, v_bias", "add_bias(v, k_bias", "rope_kv, V"),
    ],
)
def test_names_what_is_wrong_with_a_variant(device, monkeypatch, file, source, right, wrong, kernel):
    monkeypatch.setattr(mzd.device.opencl, "kernel_source", broken(source, right, wrong))
    monkeypatch.setattr(device, "_programs", {})
    index = pack_units(read_model(FIXTURES / f"{file}.gguf"))[0]
    with pytest.raises(MzdError, match="the device computes") as raised:
        self_test(device, index, activations="f32")
    assert raised.value.data["kernel"] == kernel


def test_passes_for_halves(device, llama):
    (rope,) = llama.config.ropes
    config = replace(llama.config, ropes=(replace(rope, style="halves"),))
    self_test(device, replace(llama, config=config), activations="f32")


@pytest.mark.usefixtures("with_cpu_kernels")
@pytest.mark.parametrize(
    ("source", "right", "wrong", "kernel"),
    [
        ("norm", "+ eps", "+ 2.0f * eps + 0.01f", "rms_norm"),
        ("elementwise", "1.0f + e", "1.001f + e", "gated_mul, silu"),
        ("embedding", "row % ROWS_PER_GROUP", "0", "embed, Q4_1"),
        ("matmul", "cols + eps", "cols + 0.01f", "gemv_normed, Q4_1"),
        ("matmul", "fmin(EXPONENT(x), 126.0f)", "EXPONENT(x) * 1.001f", "gemv_gated, Q4_1"),
        ("rope", "x.even * s + x.odd * c", "x.even * s - x.odd * c", "rope_kv, q"),
        ("rope", "+ t % BLOCK_TOKENS", "+ (t + 1) % BLOCK_TOKENS", "rope_kv, K"),
        ("rope", "position % CHUNK_TOKENS", "token % CHUNK_TOKENS", "rope_kv, K"),
        ("attention", "last_token) + 1 - begin", "last_token) + 2 - begin", "attention, 11 tokens"),
        ("attention", "sum = fma(partial[1], share, sum)", "sum = partial[1]", "attention, 11 tokens"),
    ],
)
def test_names_what_is_wrong(device, llama, monkeypatch, source, right, wrong, kernel):
    monkeypatch.setattr(mzd.device.opencl, "kernel_source", broken(source, right, wrong))
    monkeypatch.setattr(device, "_programs", {})
    with pytest.raises(MzdError, match="the device computes") as raised:
        self_test(device, llama, activations="f32")
    assert raised.value.code == "device_lost"
    assert raised.value.data["kernel"] == kernel


@pytest.mark.usefixtures("with_cpu_kernels")
def test_a_small_error_among_rounded_activations_shows(device, llama, monkeypatch):
    """A scale that is off by half a percent, which rounding to 8 bits would hide in exact products."""
    planted = broken("matmul_int8", "largest * (1.0f / 127.0f)", "largest * (1.0f / 126.4f)")
    monkeypatch.setattr(mzd.device.opencl, "kernel_source", planted)
    monkeypatch.setattr(device, "_programs", {})
    with pytest.raises(MzdError, match="the device computes") as raised:
        self_test(device, llama, activations="int8")
    assert raised.value.data["kernel"] == "matmul, Q4_1, 11 tokens"


GPU_PLANTS = [
    ("MULTIPLY_KERNEL(multiply_4, 4, 1)", "MULTIPLY_KERNEL(multiply_4, 2, 1)", "matmul_gpu"),
    ("MULTIPLY_KERNEL(multiply_8, 4, 2)", "MULTIPLY_KERNEL(multiply_8, 2, 2)", "matmul_gpu"),
    ("fma(w[q], (float4)(x.w)", "fma(w[q], (float4)(x.z)", "matmul_wide_gpu"),
]


@pytest.mark.parametrize(("right", "wrong", "source"), GPU_PLANTS)
def test_finds_what_is_wrong_with_products_on_a_gpu(llama, monkeypatch, right, wrong, source):
    """Which trial meets it first depends on the device: the rule that chooses launches asks for its width."""
    monkeypatch.setattr(mzd.device.opencl, "kernel_source", broken(source, right, wrong))
    device = OpenClDevice.open(kernel_class="gpu")
    with pytest.raises(MzdError, match="the device computes matmul, Q4_1"):
        self_test(device, llama, activations="f32")
    device.close()
