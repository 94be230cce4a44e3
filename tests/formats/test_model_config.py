"""The shape of a model from its metadata; all that the engine would compute wrongly is refused by name."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.layer_config import RopeConfig
from mzd.formats.metadata_keys import NEUTRAL_METADATA
from mzd.formats.model_config import ModelConfig, model_config
from tests.formats.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    STRING,
    U32,
    Array,
    Gguf,
    Tensor,
    parse,
    tiny_llama,
)

FIXTURES = Path(__file__).parents[1] / "fixtures"


def config_of(file, freq_factors=None):
    return model_config(parse(file.to_bytes()), freq_factors)


def refusal(file, code, freq_factors=None):
    with pytest.raises(FormatError) as caught:
        config_of(file, freq_factors)
    assert caught.value.code == code
    assert caught.value.message.startswith("test.gguf: ")
    return caught.value.message


class TestShape:
    def test_of_a_fixture_with_its_own_head_dim(self):
        gguf = parse((FIXTURES / "llama-F16.gguf").read_bytes())
        config = model_config(gguf, np.ones(16, np.float32))
        assert (config.num_layers, config.hidden_size, config.ffn_size, config.vocab_size) == (4, 64, 96, 320)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)  # hidden / heads is 16
        assert config.context_length == 1024
        assert config.rms_eps == pytest.approx(1e-5)
        assert config.ropes == (RopeConfig("pairs", 50_000.0, 32, (1.0,) * 16),)
        assert not config.tied_output

    def test_what_files_leave_out_has_its_usual_value(self):
        file = tiny_llama(heads=2, kv_heads=2).with_metadata(
            general__name=None, llama__attention__head_count_kv=None, tokenizer__ggml__tokens=None
        )
        config = config_of(file)
        assert config.head_dim == 16
        assert config.num_kv_heads == 2
        assert config.ropes == (RopeConfig("pairs", 10_000.0, 16, None),)
        assert config.name == "test"
        assert config.tied_output
        assert [rule.role for rule in config.head_rules] == ["token_embd", "output_norm"]

    def test_bytes_of_kv(self):
        config = config_of(tiny_llama(layers=3, heads=2, kv_heads=1))
        assert config.kv_chunk_bytes(256) == 256 * 1 * 16 * 2 * 2
        assert config.kv_bytes_per_token == 3 * 16 * 2 * 2

    def test_an_output_matrix_unties_the_head(self):
        file = tiny_llama()
        file = Gguf(file.metadata, (*file.tensors, Tensor("output.weight", (32, 8), GgmlType.F16)))
        assert not config_of(file).tied_output

    def test_numbers_that_are_arrays_of_one_value_are_that_value(self):
        file = tiny_llama(layers=2).with_metadata(
            llama__feed_forward_length=(ARRAY, Array(U32, (64, 64))),
            llama__attention__head_count_kv=(ARRAY, Array(U32, (1, 1))),
        )
        assert config_of(file).ffn_size == 64

    @pytest.mark.parametrize("type", sorted(SUPPORTED_TYPES))
    def test_every_supported_matrix_type(self, type):
        hidden, ffn = max(32, type.block_weights), max(64, type.block_weights)
        assert config_of(tiny_llama(hidden=hidden, ffn=ffn, matrix_type=type)).num_layers == 1

    def test_norms_may_be_half_precision_and_have_trailing_ones(self):
        file = tiny_llama().with_tensor("output_norm.weight", type=GgmlType.F16, dims=(32, 1))
        assert config_of(file).hidden_size == 32

    def test_an_embedding_may_be_padded(self):
        file = tiny_llama(vocab=16)  # of 8 tokens
        assert config_of(file).vocab_size == 16


class TestRope:
    def test_llama3_factors_are_kept(self):
        factors = np.linspace(1, 8, 8, dtype=np.float32)
        assert config_of(tiny_llama(), factors).ropes[0].freq_factors == tuple(float(f) for f in factors)

    @pytest.mark.parametrize("key", ["rope__scaling__factor", "rope__scale_linear"])
    def test_linear_scaling_divides_every_frequency(self, key):
        file = tiny_llama().with_metadata(**{f"llama__{key}": (F32, 4.0)})
        assert config_of(file).ropes[0].freq_factors == (4.0,) * 8
        both = config_of(file, np.array([1, 1, 1, 1, 2, 2, 2, 2], np.float32))
        assert both.ropes[0].freq_factors == (4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 8.0)

    def test_scaling_of_none_ignores_the_factor(self):
        file = tiny_llama().with_metadata(
            llama__rope__scaling__type=(STRING, "none"), llama__rope__scaling__factor=(F32, 4.0)
        )
        assert config_of(file).ropes[0].freq_factors is None

    @pytest.mark.parametrize("kind", ["yarn", "longrope", "su", "dynamic"])
    def test_other_scalings_are_refused_by_name(self, kind):
        file = tiny_llama().with_metadata(llama__rope__scaling__type=(STRING, kind))
        assert kind in refusal(file, "unsupported_architecture")

    @pytest.mark.parametrize("factors", [np.ones(7), np.zeros(8), np.full(8, np.nan), -np.ones(8)])
    def test_factors_that_make_no_sense_are_refused(self, factors):
        assert "RoPE factors" in refusal(tiny_llama(), "invalid_model", factors.astype(np.float32))

    @pytest.mark.parametrize("dimensions", [18, 7])
    def test_dimensions_fit_the_head(self, dimensions):
        file = tiny_llama().with_metadata(llama__rope__dimension_count=(U32, dimensions))
        assert f"{dimensions} RoPE dimensions" in refusal(file, "invalid_model")

    @pytest.mark.parametrize("base", [0.0, -1.0, float("inf"), float("nan")])
    def test_the_base_is_a_positive_number(self, base):
        file = tiny_llama().with_metadata(llama__rope__freq_base=(F32, base))
        assert "RoPE base" in refusal(file, "invalid_model")


class TestUnsupported:
    @pytest.mark.parametrize("architecture", ["qwen3moe", "qwen2moe", "mamba", "gemma3n", "llama4"])
    def test_case_121_architectures_by_name_and_never_as_damage(self, architecture):
        message = refusal(
            tiny_llama().with_metadata(general__architecture=(STRING, architecture)),
            "unsupported_architecture",
        )
        assert f"'{architecture}'" in message
        assert "llama" in message

    @pytest.mark.parametrize("type", [GgmlType.Q2_K, GgmlType.IQ4_NL, GgmlType.MXFP4])
    def test_types_that_are_not_computed(self, type):
        hidden = max(32, type.block_weights)
        file = tiny_llama(hidden=hidden, ffn=hidden, matrix_type=type)
        message = refusal(file, "unsupported_type")
        assert f"'token_embd.weight' has the unsupported type {type.name}" in message

    def test_mixtures_of_experts(self):
        file = tiny_llama().with_metadata(llama__expert_count=(U32, 8))
        assert "mixture of 8 experts" in refusal(file, "unsupported_architecture")

    @pytest.mark.parametrize("key", [key for key in NEUTRAL_METADATA if key != "expert_count"])
    def test_metadata_that_changes_the_answer(self, key):
        kind, harmful = (BOOL, 0) if key == "attention.causal" else (F32, 30.0)
        if key == "use_parallel_residual":
            kind, harmful = BOOL, 1
        file = tiny_llama()
        metadata = {**file.metadata, f"llama.{key}": (kind, harmful)}
        assert f"llama.{key}" in refusal(Gguf(metadata, file.tensors), "unsupported_architecture")
        metadata[f"llama.{key}"] = (kind, int(NEUTRAL_METADATA[key][0]))
        assert config_of(Gguf(metadata, file.tensors)).num_layers == 1

    def test_a_sliding_window_that_the_context_outgrows(self):
        file = tiny_llama().with_metadata(llama__attention__sliding_window=(U32, 64))
        assert "sliding window of 64" in refusal(file, "unsupported_architecture")
        wide = tiny_llama().with_metadata(llama__attention__sliding_window=(U32, 128))
        assert config_of(wide).context_length == 128

    def test_layers_that_differ(self):
        file = tiny_llama(layers=2).with_metadata(llama__feed_forward_length=(ARRAY, Array(U32, (64, 96))))
        assert "differs between layers" in refusal(file, "unsupported_architecture")

    def test_values_of_another_size_than_keys(self):
        file = tiny_llama().with_metadata(llama__attention__value_length=(U32, 8))
        assert "values of 8" in refusal(file, "unsupported_architecture")

    @pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_factors_long.weight", "blk.1.attn_q.weight"])
    def test_tensors_that_would_be_left_out(self, name):
        file = tiny_llama()
        file = Gguf(file.metadata, (*file.tensors, Tensor(name, (32,))))
        assert f"'{name}'" in refusal(file, "unsupported_architecture")


class TestInvalid:
    def test_every_tensor_is_needed(self):
        file = tiny_llama()
        for tensor in file.tensors:
            message = refusal(file.with_tensor(tensor.name, dims=None), "invalid_model")
            assert f"'{tensor.name}' is missing" in message

    def test_every_dimension_is_checked(self):
        file = tiny_llama()
        for tensor in file.tensors[1:]:
            for i in range(len(tensor.dims)):
                dims = tuple(dim * 2 if i == j else dim for j, dim in enumerate(tensor.dims))
                message = refusal(file.with_tensor(tensor.name, dims=dims), "invalid_model")
                assert f"'{tensor.name}' is {list(dims)}, expected {list(tensor.dims)}" in message

    def test_types_of_norms_and_matrices(self):
        for name, type in (("blk.0.attn_norm.weight", GgmlType.Q8_0), ("blk.0.attn_q.weight", GgmlType.Q5_0)):
            file = tiny_llama().with_tensor(name, type=type)
            message = refusal(file, "unsupported_type")
            assert f"'{name}'" in message
            assert type.name in message

    @pytest.mark.parametrize(
        "key",
        [
            "block_count",
            "embedding_length",
            "attention.head_count",
            "feed_forward_length",
            "context_length",
            "attention.layer_norm_rms_epsilon",
        ],
    )
    def test_keys_that_every_model_has(self, key):
        metadata = dict(tiny_llama().metadata)
        for value in (None, (STRING, "4"), (U32, 0), (BOOL, 1), (ARRAY, Array(U32, ()))):
            metadata.pop(f"llama.{key}", None)
            if value is not None:
                metadata[f"llama.{key}"] = value
            with pytest.raises(FormatError) as caught:
                config_of(Gguf(metadata, tiny_llama().tensors))
            assert key in caught.value.message or "rms_eps" in caught.value.message

    def test_case_118_a_file_without_tensors_or_metadata(self):
        assert "general.architecture" in refusal(Gguf(), "invalid_model")
        assert "token_embd.weight" in refusal(Gguf(tiny_llama().metadata), "invalid_model")

    @pytest.mark.parametrize("count", [None, (U32, 0)])
    def test_case_118_a_model_without_layers(self, count):
        """Whether or not there are tensors of layers; nothing is divided by their number."""
        for layers in (0, 1):
            file = tiny_llama(layers=layers).with_metadata(llama__block_count=count)
            assert "llama.block_count" in refusal(file, "invalid_model")

    def test_fewer_layers_told_than_there_are(self):
        file = tiny_llama(layers=2).with_metadata(llama__block_count=(U32, 1))
        assert "llama.block_count is 1" in refusal(file, "invalid_model")

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
    def test_an_epsilon_that_no_norm_has(self, value):
        file = tiny_llama().with_metadata(llama__attention__layer_norm_rms_epsilon=(F32, value))
        assert "layer_norm_rms_epsilon" in refusal(file, "invalid_model")

    @pytest.mark.parametrize("value", [(U32, 1), (ARRAY, Array(STRING, ("llama",)))])
    def test_an_architecture_that_is_no_name(self, value):
        assert "general.architecture" in refusal(Gguf({"general.architecture": value}), "invalid_model")

    def test_a_vocabulary_larger_than_the_embedding(self):
        assert "4 rows" in refusal(tiny_llama(vocab=4), "invalid_model")
        wrong = tiny_llama().with_metadata(llama__vocab_size=(U32, 9))
        assert "vocabulary of 9" in refusal(wrong, "invalid_model")

    def test_heads_that_do_not_divide(self):
        file = tiny_llama().with_metadata(llama__attention__head_count=(U32, 3))
        assert "3 heads" in refusal(file, "invalid_model")
        file = tiny_llama().with_metadata(llama__attention__head_count_kv=(U32, 3))
        assert "3 K/V heads" in refusal(file, "invalid_model")

    def test_billions_of_layers_end_at_the_first_that_is_missing(self):
        file = tiny_llama().with_metadata(llama__block_count=(U32, 2**32 - 1))
        assert "'blk.1.attn_norm.weight' is missing" in refusal(file, "invalid_model")


_values = st.one_of(
    st.tuples(st.just(U32), st.sampled_from([0, 1, 2, 3, 16, 32, 64, 2**31, 2**32 - 1])),
    st.tuples(st.just(F32), st.floats(width=32)),
    st.tuples(st.just(STRING), st.text(max_size=5)),
    st.tuples(st.just(BOOL), st.sampled_from([0, 1])),
    st.tuples(st.just(ARRAY), st.lists(st.integers(0, 99), max_size=3).map(lambda i: Array(U32, tuple(i)))),
    st.none(),
)
_KEYS = [*tiny_llama().metadata, "llama.rope.dimension_count", "llama.attention.key_length"]
_KEYS += ["llama.attention.value_length", "llama.rope.scaling.type", "llama.rope.scaling.factor"]
_KEYS += [f"llama.{key}" for key in NEUTRAL_METADATA] + ["llama.attention.sliding_window", "llama.vocab_size"]


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _values, max_size=4))
def test_any_metadata_gives_a_model_or_a_refusal(changes):
    metadata = {**tiny_llama().metadata, **changes}
    file = Gguf({key: value for key, value in metadata.items() if value is not None}, tiny_llama().tensors)
    try:
        config = config_of(file)
    except FormatError:
        return
    assert isinstance(config, ModelConfig)
    assert config.hidden_size == 32  # the tensors are what they were: nothing else can come through
    assert config.num_heads * config.head_dim == 32
