"""Owns the shape of a model: read from GGUF metadata, checked against its tensors, refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError
from mzd.formats.architectures import (
    ARCHITECTURES,
    HEAD_TENSORS,
    OUTPUT_TENSOR,
    Architecture,
    SizeName,
    TensorRule,
)
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.gguf import GgufFile, TensorInfo, quoted
from mzd.formats.layer_config import LayerConfig, RopeConfig, check, read_layers
from mzd.formats.metadata_keys import MetadataKeys

ROPE_FREQS_TENSOR = "rope_freqs.weight"
CONTEXT_LENGTH_MAX = 2**31 - 1  # positions are int32 in kernels
VECTOR_TYPES = frozenset({GgmlType.F32, GgmlType.F16})  # norms; stored as F32, which holds both exactly


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. `hidden_size` need not be `num_heads * head_dim`.

    Attributes:
        ropes: the rotations that layers take, each once.
        layers: what sets each layer apart, `num_layers` of them.
        attention_scale: factor of q . k.
        attention_softcap, logit_softcap: s becomes cap * tanh(s / cap), for scores and logits; or None.
        embedding_scale: factor of embedding rows.

    Raises:
        ValueError: values that no model has.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_eps: float
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embedding_scale: float
    tied_output: bool

    def __post_init__(self) -> None:
        check(self.architecture in ARCHITECTURES, f"architecture {quoted(self.architecture)}")
        counts = (self.num_layers, self.hidden_size, self.ffn_size, self.vocab_size)
        check(min(counts) > 0, f"layers, hidden size, MLP size, vocabulary of {counts}")
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        check(min(heads) > 0, f"heads, K/V heads, head dimension of {heads}")
        check(self.num_heads % self.num_kv_heads == 0, f"{heads[0]} heads over {heads[1]} K/V heads")
        check(0 < self.context_length <= CONTEXT_LENGTH_MAX, f"context_length {self.context_length}")
        check(self.head_dim % 2 == 0, f"head_dim {self.head_dim}")
        self._check_layers()
        self._check_factors()

    def _check_layers(self) -> None:
        check(len(self.layers) == self.num_layers, f"{self.num_layers} layers and {len(self.layers)} kinds")
        for rope in self.ropes:
            check(rope.dimensions <= self.head_dim, f"{rope.dimensions} RoPE dimensions")
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        check(max(ropes, default=-1) < len(self.ropes), f"RoPE {max(ropes, default=-1)} of {len(self.ropes)}")

    def _check_factors(self) -> None:
        factors = {
            "rms_eps": self.rms_eps,
            "attention_scale": self.attention_scale,
            "attention_softcap": self.attention_softcap,
            "logit_softcap": self.logit_softcap,
            "embedding_scale": self.embedding_scale,
        }
        for name, value in factors.items():
            check(value is None or (math.isfinite(value) and value > 0), f"{name} {value}")

    @property
    def description(self) -> Architecture:
        """What the layers compute."""
        return ARCHITECTURES[self.architecture]

    def size(self, name: SizeName) -> int:
        """The length that a dimension of this name has in this model."""
        sizes: dict[SizeName, int] = {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "vocab": self.vocab_size,
        }
        return sizes[name]

    def dims(self, rule: TensorRule) -> tuple[int, ...]:
        """The dimensions, in GGUF order, that a tensor has in this model."""
        return tuple(self.size(name) for name in rule.dims)

    @property
    def layer_rules(self) -> tuple[TensorRule, ...]:
        """The tensors of each layer, in order of use."""
        return self.description.layer_tensors

    @property
    def head_rules(self) -> tuple[TensorRule, ...]:
        """The tensors of the head unit, in order of use."""
        return HEAD_TENSORS if self.tied_output else (*HEAD_TENSORS, OUTPUT_TENSOR)

    def kv_chunk_bytes(self, chunk_tokens: int) -> int:
        """Bytes of K and V, float16, of `chunk_tokens` tokens in one layer."""
        return chunk_tokens * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, float16, of one token in all layers."""
        return self.num_layers * self.kv_chunk_bytes(1)


def layer_tensor_name(layer: int, rule: TensorRule) -> str:
    """The name in a GGUF file of a layer's tensor."""
    return f"blk.{layer}.{rule.file_name}"


def head_tensor_name(rule: TensorRule) -> str:
    """The name in a GGUF file of a tensor of the head unit."""
    return rule.file_name


def model_config(gguf: GgufFile, freq_factors: NDArray[np.float32] | None) -> ModelConfig:
    """The shape of the model in a GGUF file; everything the engine relies on is checked here.

    Args:
        freq_factors: contents of `rope_freqs.weight`, (rope dimensions / 2,), or None if the file has none.

    Raises:
        FormatError: `unsupported_architecture` for what the engine would compute wrongly, naming it;
            `unsupported_type` naming tensor and type; `invalid_model` for a missing or misshapen tensor
            or metadata key, naming it.
    """
    keys = MetadataKeys(gguf)
    keys.refuse_what_is_not_computed()
    config = _config(keys, freq_factors)
    _check_tensors(gguf, config)
    return config


def _config(keys: MetadataKeys, freq_factors: NDArray[np.float32] | None) -> ModelConfig:
    embedding = keys.gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.invalid("tensor 'token_embd.weight' is missing")
    num_layers = _num_layers(keys)
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    description = keys.description
    try:
        ropes, layers = read_layers(keys, num_layers=num_layers, head_dim=head_dim, freq_factors=freq_factors)
        return ModelConfig(
            architecture=keys.architecture,
            name=_name(keys.gguf),
            num_layers=num_layers,
            hidden_size=hidden_size,
            ffn_size=keys.count("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=keys.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=_vocab_size(keys, embedding),
            context_length=keys.count("context_length"),
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            ropes=ropes,
            layers=layers,
            attention_scale=_attention_scale(description, num_layers, head_dim, hidden_size // num_heads),
            attention_softcap=keys.soft_cap("attn_logit_softcapping", description.attention_softcap),
            logit_softcap=keys.soft_cap("final_logit_softcapping", description.logit_softcap),
            embedding_scale=math.sqrt(hidden_size) if description.scales_embedding else 1.0,
            tied_output="output.weight" not in keys.gguf.tensors,
        )
    except ValueError as error:
        raise keys.invalid(str(error)) from None


def _num_layers(keys: MetadataKeys) -> int:
    """Layers, each with a tensor in the file: nothing as long as the number alone is made."""
    num_layers = keys.count("block_count")
    first = keys.description.layer_tensors[0]
    for layer in range(num_layers):
        name = layer_tensor_name(layer, first)
        if name not in keys.gguf.tensors:
            raise _missing(keys.gguf, name)
    beyond = layer_tensor_name(num_layers, first)
    if beyond in keys.gguf.tensors:
        raise keys.invalid(
            f"{keys.architecture}.block_count is {num_layers}, but there is a tensor {quoted(beyond)}"
        )
    return num_layers


def _attention_scale(description: Architecture, num_layers: int, head_dim: int, width: int) -> float:
    """The factor of q . k; `width` is hidden / heads, what a head had without a head_dim of its own."""
    return 1.0 / math.sqrt(width if num_layers in description.wide_query_layers else head_dim)


def _name(gguf: GgufFile) -> str:
    name = gguf.metadata.get("general.name")
    return name if isinstance(name, str) and name else PurePath(gguf.name).stem


def _head_dim(keys: MetadataKeys, hidden_size: int, num_heads: int) -> int:
    """Channels of one head: told by the file, else hidden / heads."""
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise keys.invalid(f"a hidden size of {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    value_dim = keys.count("attention.value_length", hidden_size // num_heads)
    if value_dim != head_dim:
        raise keys.unsupported(f"keys of {head_dim} channels with values of {value_dim} are not supported")
    return head_dim


def _vocab_size(keys: MetadataKeys, embedding: TensorInfo) -> int:
    """Rows of the embedding; there may be more than tokens (padding), never fewer."""
    vocab_size = keys.count("vocab_size", embedding.rows)
    tokens = keys.gguf.metadata.get("tokenizer.ggml.tokens", ())
    num_tokens = len(tokens) if isinstance(tokens, tuple) else 0
    if vocab_size != embedding.rows or num_tokens > vocab_size:
        raise keys.invalid(
            f"the embedding has {embedding.rows} rows for a vocabulary of {max(vocab_size, num_tokens)}"
        )
    return vocab_size


def _check_tensors(gguf: GgufFile, config: ModelConfig) -> None:
    """Every tensor that is needed is there, in a shape and type that is computed, and no other tensor is."""
    expected = {ROPE_FREQS_TENSOR}
    for name, rule in _named_rules(config):
        _check_tensor(gguf, name, config.dims(rule), VECTOR_TYPES if rule.is_vector else SUPPORTED_TYPES)
        expected.add(name)
    for name in gguf.tensors:
        if name not in expected:  # a bias or a norm that would be left out of the computation
            raise FormatError(
                f"{gguf.name}: tensor {quoted(name)} has no place in a {config.architecture} model "
                "as it is computed here",
                code="unsupported_architecture",
                path=gguf.name,
                tensor=name,
            )


def _named_rules(config: ModelConfig) -> Iterator[tuple[str, TensorRule]]:
    for rule in config.head_rules:
        yield head_tensor_name(rule), rule
    for layer in range(config.num_layers):
        for rule in config.layer_rules:
            yield layer_tensor_name(layer, rule), rule


def _check_tensor(gguf: GgufFile, name: str, dims: tuple[int, ...], types: frozenset[GgmlType]) -> None:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise _missing(gguf, name)
    if _trimmed(tensor.dims) != _trimmed(dims):
        raise FormatError(
            f"{gguf.name}: tensor {quoted(name)} is {list(tensor.dims)}, expected {list(dims)}",
            path=gguf.name,
            tensor=name,
        )
    if tensor.type not in types:
        raise FormatError(
            f"{gguf.name}: tensor {quoted(name)} has the unsupported type {tensor.type.name}; "
            f"supported here: {', '.join(sorted(type.name for type in types))}",
            code="unsupported_type",
            path=gguf.name,
            tensor=name,
            type=tensor.type.name,
        )


def _missing(gguf: GgufFile, name: str) -> FormatError:
    return FormatError(f"{gguf.name}: tensor {quoted(name)} is missing", path=gguf.name, tensor=name)


def _trimmed(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing ones, which some writers add."""
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return dims
