"""The architectures: which tensors they ask for, and what each of their layers sees and how it turns."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import mzd
from mzd.errors import FormatError
from mzd.formats.architectures import ARCHITECTURES, Architecture
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import LayerConfig, RopeConfig
from mzd.formats.model_config import layer_tensor_name, model_config
from tests.formats.gguf_files import ARRAY, BOOL, F32, STRING, U32, Array, Gguf, Tensor, parse, tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures"
HIDDEN, HEAD_DIM = 32, 16


def fixture_config(name):
    return model_config(parse((FIXTURES / f"{name}.gguf").read_bytes()), None)


def tiny(architecture, *, layers=2, **metadata):
    """`tiny_llama`, with the tensors and the prefix of another architecture; metadata as `with_metadata`."""
    base = tiny_llama(layers=layers)
    sizes = {"hidden": HIDDEN, "ffn": 64, "q": HIDDEN, "kv": HEAD_DIM, "head": HEAD_DIM, "vocab": 8}
    tensors = [tensor for tensor in base.tensors if not tensor.name.startswith("blk.")]
    for layer in range(layers):
        for rule in ARCHITECTURES[architecture].layer_tensors:
            type = GgmlType.F32 if rule.is_vector else GgmlType.F16
            dims = tuple(sizes[dim] for dim in rule.dims)
            tensors.append(Tensor(layer_tensor_name(layer, rule), dims, type))
    renamed = {key.replace("llama.", f"{architecture}.", 1): value for key, value in base.metadata.items()}
    renamed["general.architecture"] = (STRING, architecture)
    renamed |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return Gguf(renamed, tuple(tensors))


def config_of(file):
    return model_config(parse(file.to_bytes()), None)


def refusal(file, code):
    with pytest.raises(FormatError) as caught:
        config_of(file)
    assert caught.value.code == code
    return caught.value.message


def windows(config):
    return [layer.window for layer in config.layers]


def test_each_has_golden_values():
    models = json.loads((FIXTURES / "expected.json").read_text())["models"]
    shown = {model["arch"] for model in models if (FIXTURES / model["file"]).exists()}
    assert shown == set(ARCHITECTURES)


def test_only_descriptions_know_their_names():
    named = re.compile(rf"\b({'|'.join(ARCHITECTURES)})\b(?!\.cpp)", re.IGNORECASE)
    for folder in ("device", "kernels"):
        for path in (Path(mzd.__file__).parent / folder).glob("*.[pc][yl]"):
            assert not named.findall(path.read_text()), path


class TestTensors:
    def test_roles_follow_from_the_description(self):
        everything = Architecture("halves", norms="both", qkv_bias=True, qk_norm=True)
        assert [rule.role for rule in everything.layer_tensors] == [
            *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_bias", "attn_k_bias", "attn_v_bias"),
            *("attn_q_norm", "attn_k_norm", "attn_output", "post_attention_norm"),
            *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down", "post_ffw_norm"),
        ]
        roles = [rule.role for rule in Architecture("halves", norms="after").layer_tensors]
        assert "attn_norm" not in roles
        assert "ffn_norm" not in roles

    @pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
    def test_each_is_needed(self, architecture):
        file = tiny(architecture)
        assert config_of(file).architecture == architecture
        for tensor in file.tensors:
            message = refusal(file.with_tensor(tensor.name, dims=None), "invalid_model")
            assert f"'{tensor.name}' is missing" in message

    @pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
    def test_no_other_is_left_out_in_silence(self, architecture):
        file = tiny(architecture)
        file = Gguf(file.metadata, (*file.tensors, Tensor("blk.0.attn_output.bias", (HIDDEN,))))
        assert "'blk.0.attn_output.bias'" in refusal(file, "unsupported_architecture")

    def test_names_of_biases(self):
        rules = {rule.role: rule for rule in ARCHITECTURES["qwen2"].layer_tensors}
        assert layer_tensor_name(3, rules["attn_q_bias"]) == "blk.3.attn_q.bias"
        assert rules["attn_q_bias"].is_vector


class TestFixtures:
    def test_qwen2_has_no_head_dim_of_its_own(self):
        config = fixture_config("qwen2-F16")
        assert config.head_dim == config.hidden_size // config.num_heads
        assert config.tied_output
        assert config.ropes[0].style == "halves"

    def test_qwen3_has(self):
        config = fixture_config("qwen3-F16")
        assert config.head_dim != config.hidden_size // config.num_heads
        assert config.attention_scale == pytest.approx(config.head_dim**-0.5)

    def test_exaone4_is_global_throughout(self):
        assert fixture_config("exaone4-F16").layers == (LayerConfig(window=None, rope=0),) * 4

    def test_exaone4_hybrid_turns_on_sliding_layers_only(self):
        near, far = LayerConfig(window=64, rope=0), LayerConfig(window=None, rope=None)
        assert fixture_config("exaone4hybrid-F16").layers == (near, near, near, far) * 16

    def test_gemma2(self):
        config = fixture_config("gemma2-F16")
        assert windows(config) == [64, None, 64, None]
        assert (config.attention_softcap, config.logit_softcap) == (4.0, 30.0)
        assert config.embedding_scale == 8.0
        assert [rope.base for rope in config.ropes] == [10_000.0]

    def test_gemma3_has_two_rotations(self):
        config = fixture_config("gemma3-F16")
        assert windows(config) == [64, 64, 64, 64, 64, None, 64]
        assert [layer.rope for layer in config.layers] == [0, 0, 0, 0, 0, 1, 0]
        assert config.ropes == (
            RopeConfig("halves", 10_000.0, 32, None),
            RopeConfig("halves", 1e6, 32, (8.0,) * 16),
        )
        assert config.attention_softcap is config.logit_softcap is None


class TestWindows:
    def test_where_the_file_gives_none(self):
        assert windows(config_of(tiny("gemma2"))) == [4096, None]
        assert config_of(tiny("gemma3")).layers == (LayerConfig(None, 0),) * 2
        assert config_of(tiny("exaone4")).layers == (LayerConfig(None, 0),) * 2

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ((ARRAY, Array(BOOL, (0, 1, 1))), [None, 64, 64]),
            ((U32, 2), [64, None, 64]),
            ((U32, 1), [None, None, None]),
        ],
    )
    def test_a_pattern_of_the_file(self, pattern, expected):
        window = {"attention__sliding_window": (U32, 64), "attention__sliding_window_pattern": pattern}
        for architecture in ("gemma2", "gemma3", "exaone4"):
            config = config_of(tiny(architecture, layers=3, **window))
            assert windows(config) == expected
        assert [layer.rope is None for layer in config.layers] == [seen is None for seen in expected]

    @pytest.mark.parametrize(
        "pattern", [(ARRAY, Array(BOOL, (1,))), (ARRAY, Array(U32, (1, 0))), (U32, 0), (STRING, "LLLG")]
    )
    def test_patterns_that_make_no_sense(self, pattern):
        window = {"attention__sliding_window": (U32, 64), "attention__sliding_window_pattern": pattern}
        assert "sliding_window_pattern" in refusal(tiny("gemma3", **window), "invalid_model")

    def test_a_base_of_the_file_for_sliding_layers(self):
        bases = {"rope__freq_base": (F32, 1e6), "rope__freq_base_swa": (F32, 5e3)}
        config = config_of(tiny("gemma3", layers=6, attention__sliding_window=(U32, 64), **bases))
        assert [rope.base for rope in config.ropes] == [5e3, 1e6]

    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
    def test_architectures_without_windows_refuse_them(self, architecture):
        file = tiny(architecture, attention__sliding_window=(U32, 64))
        assert "sliding window of 64" in refusal(file, "unsupported_architecture")


class TestFactors:
    def test_caps_of_gemma2(self):
        config = config_of(tiny("gemma2"))
        assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
        off = config_of(tiny("gemma2", attn_logit_softcapping=(F32, 0.0), final_logit_softcapping=(F32, 0.0)))
        assert off.attention_softcap is off.logit_softcap is None

    @pytest.mark.parametrize("cap", [-1.0, math.inf, math.nan])
    def test_caps_are_above_zero(self, cap):
        file = tiny("gemma2", attn_logit_softcapping=(F32, cap))
        assert "attention_softcap" in refusal(file, "invalid_model")

    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "exaone4", "gemma3"])
    def test_architectures_without_caps_refuse_them(self, architecture):
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            assert key in refusal(tiny(architecture, **{key: (F32, 30.0)}), "unsupported_architecture")

    @pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
    def test_the_largest_gemmas_scale_scores_by_their_width(self, architecture, layers):
        wide = {"attention__key_length": (U32, 16), "attention__value_length": (U32, 16)}
        wide["attention__head_count"] = (U32, 1)  # hidden / heads is 32
        for num_layers, divisor in ((layers, 32), (layers - 1, 16)):
            file = tiny(architecture, layers=num_layers, **wide)
            for layer in range(num_layers):
                file = file.with_tensor(f"blk.{layer}.attn_q.weight", dims=(32, 16))
                file = file.with_tensor(f"blk.{layer}.attn_output.weight", dims=(16, 32))
            assert config_of(file).attention_scale == pytest.approx(divisor**-0.5)

    def test_only_gemmas_scale_their_embedding(self):
        scales = {name: config_of(tiny(name)).embedding_scale for name in ARCHITECTURES}
        assert {name for name, scale in scales.items() if scale != 1.0} == {"gemma2", "gemma3"}
        assert scales["gemma2"] == np.sqrt(HIDDEN)
