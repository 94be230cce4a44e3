"""The models that can be pulled by name: pinned, computed here, and as large as they declare."""

from pathlib import Path

import pytest

from mzd.errors import MzdError
from mzd.formats.architectures import ARCHITECTURES
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.memory_need import memory_need
from mzd.model.declared_shape import Q4_K_M, Q8_0, DeclaredShape, TypeMix
from mzd.model.importer import import_gguf
from mzd.model.known_models import KNOWN_MODELS, HubSource, WheelSource, known_model
from mzd.model.library import checked_name
from mzd.policy.units import CHUNK_TOKENS
from tests.reference.model import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
REAL_MODEL = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
KNOWN = pytest.mark.parametrize("name", KNOWN_MODELS)


def tensor_bytes(shape):
    """Bytes of all tensors in the GGUF file, each padded to 32."""
    layers, head = shape.plan()
    specs = [spec for unit in (*layers, head) for spec in unit.tensors]
    sizes = [spec.type.row_bytes(spec.cols) * spec.rows for spec in specs]
    return sum(-(-size // 32) * 32 for size in sizes)


@KNOWN
def test_each_is_pinned_by_content(name):
    model = KNOWN_MODELS[name]
    assert checked_name(name) == name
    assert len(bytes.fromhex(model.sha256)) == 32
    if isinstance(model.source, WheelSource):
        assert "==" in model.source.requirement
    else:
        assert len(bytes.fromhex(model.source.revision)) == 20
        assert model.source.file.endswith(".gguf")
        assert model.source.label == f"hf:{model.source.repository}/{model.source.file}"


@KNOWN
def test_each_declares_a_shape_that_makes_up_the_size_of_its_file(name):
    """What is left over is the header, most of it the vocabulary: 20 to 70 bytes a token."""
    model = KNOWN_MODELS[name]
    header_bytes = model.size_bytes - tensor_bytes(model.shape)
    assert 20 * model.shape.vocab_size < header_bytes < 70 * model.shape.vocab_size


def test_two_of_one_vocabulary_have_headers_of_one_size():
    small, large = KNOWN_MODELS["qwen3-0.6b"], KNOWN_MODELS["qwen3-1.7b"]
    left = [model.size_bytes - tensor_bytes(model.shape) for model in (small, large)]
    assert left[0] == left[1]


@KNOWN
def test_each_is_of_types_that_are_computed(name):
    layers, head = KNOWN_MODELS[name].shape.plan()
    for unit in (*layers, head):
        for spec in unit.tensors:
            assert spec.type in SUPPORTED_TYPES
            assert spec.cols % spec.type.block_weights == 0


def test_unknown_names_tell_the_known_ones():
    with pytest.raises(MzdError, match=r"known: smollm2-135m, .*, and hf:OWNER/REPO/FILE") as caught:
        known_model("gpt-5", KNOWN_MODELS)
    assert (caught.value.code, caught.value.data["known"]) == ("not_found", list(KNOWN_MODELS))


Q4_0 = TypeMix("Q4_0", GgmlType.Q4_0, GgmlType.Q4_0)  # as the fixtures are, the head too


def declared(name, types):
    """The shape of a fixture, as its file has it."""
    config = read_model(FIXTURES / f"{name}.gguf").config
    return DeclaredShape(
        config.architecture,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_size=config.ffn_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        types=types,
        tied_output=config.tied_output,
    )


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("llama-Q8_0", Q8_0),
        ("qwen2-Q4_1", TypeMix("Q4_1", GgmlType.Q4_1, GgmlType.Q4_1)),
        ("qwen3-Q4_0", Q4_0),
        ("exaone4-Q8_0", Q8_0),
        ("gemma2-Q8_0", Q8_0),
        ("gemma3-Q4_0", Q4_0),
    ],
)
def test_a_declared_need_is_that_of_the_imported_model(name, types, tmp_path):
    index = import_gguf(FIXTURES / f"{name}.gguf", tmp_path / "weights.mzw")
    stored = memory_need(index.config, index.layers, index.head, chunk_tokens=CHUNK_TOKENS)
    assert declared(name, types).memory_need(chunk_tokens=CHUNK_TOKENS) == stored


@pytest.mark.model
@pytest.mark.skipif(not REAL_MODEL.exists(), reason="the real model is not here")
def test_the_declared_shape_of_the_real_model_is_true(tmp_path):
    known = KNOWN_MODELS["smollm2-135m"]
    index = import_gguf(REAL_MODEL, tmp_path / "weights.mzw")
    stored = memory_need(index.config, index.layers, index.head, chunk_tokens=CHUNK_TOKENS)
    assert known.shape.memory_need(chunk_tokens=CHUNK_TOKENS) == stored
    assert (index.source.size_bytes, index.source.sha256) == (known.size_bytes, known.sha256)


def test_a_mix_prefers_the_first_and_last_eighth_and_each_third_layer_between():
    """llama.cpp's rule; in 16 layers: 0, 1, 4, 7, 10, 13, 14 and 15."""
    (down,) = (rule for rule in ARCHITECTURES["llama"].layer_tensors if rule.role == "ffn_down")
    (gate,) = (rule for rule in ARCHITECTURES["llama"].layer_tensors if rule.role == "ffn_gate")
    preferred = [layer for layer in range(16) if Q4_K_M.layer_type(down, layer, 16) is Q4_K_M.preferred]
    assert preferred == [0, 1, 4, 7, 10, 13, 14, 15]
    assert {Q4_K_M.layer_type(gate, layer, 16) for layer in range(16)} == {Q4_K_M.matrices}


def test_a_source_names_a_revision():
    assert HubSource("a/b", "c.gguf").revision == "main"
