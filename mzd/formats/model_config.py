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
    NEUTRAL_METADATA,
    OUTPUT_TENSOR,
    VECTOR_TYPES,
    RopeStyle,
    SizeName,
    TensorRule,
)
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.gguf import GgufFile, MetaValue, TensorInfo, quoted

ROPE_FREQS_TENSOR = "rope_freqs.weight"
ROPE_BASE_DEFAULT = 10_000.0  # what converters leave out
CONTEXT_LENGTH_MAX = 2**31 - 1  # positions are int32 in kernels


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: channel pair i turns by position * base^(-2i/dimensions) / freq_factors[i].

    Attributes:
        dimensions: channels of a head that rotate; even, at most head_dim.
        freq_factors: dimensions / 2 divisors (llama3 and linear scaling), or None for all ones.

    Raises:
        ValueError: values that no model has.
    """

    style: RopeStyle
    base: float
    dimensions: int
    freq_factors: tuple[float, ...] | None

    def __post_init__(self) -> None:
        _check(self.style in ("pairs", "halves"), f"RoPE style {self.style!r}")
        _check(math.isfinite(self.base) and self.base > 0, f"RoPE base {self.base}")
        _check(self.dimensions > 0 and self.dimensions % 2 == 0, f"{self.dimensions} RoPE dimensions")
        if self.freq_factors is not None:
            _check(len(self.freq_factors) == self.dimensions // 2, f"{len(self.freq_factors)} RoPE factors")
            _check(
                all(math.isfinite(f) and f > 0 for f in self.freq_factors),
                "RoPE factors that are not above zero",
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. `hidden_size` need not be `num_heads * head_dim`.

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
    rope: RopeConfig
    tied_output: bool

    def __post_init__(self) -> None:
        _check(self.architecture in ARCHITECTURES, f"architecture {quoted(self.architecture)}")
        counts = (self.num_layers, self.hidden_size, self.ffn_size, self.vocab_size)
        _check(min(counts) > 0, f"layers, hidden size, MLP size, vocabulary of {counts}")
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        _check(min(heads) > 0, f"heads, K/V heads, head dimension of {heads}")
        _check(self.num_heads % self.num_kv_heads == 0, f"{heads[0]} heads over {heads[1]} K/V heads")
        _check(0 < self.context_length <= CONTEXT_LENGTH_MAX, f"context_length {self.context_length}")
        _check(math.isfinite(self.rms_eps) and self.rms_eps > 0, f"rms_eps {self.rms_eps}")
        _check(self.head_dim % 2 == 0, f"head_dim {self.head_dim}")
        _check(self.rope.dimensions <= self.head_dim, f"{self.rope.dimensions} RoPE dimensions")

    def size(self, name: SizeName) -> int:
        """The length that a dimension of this name has in this model."""
        sizes: dict[SizeName, int] = {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "vocab": self.vocab_size,
        }
        return sizes[name]

    def dims(self, rule: TensorRule) -> tuple[int, ...]:
        """The dimensions, in GGUF order, that a tensor has in this model."""
        return tuple(self.size(name) for name in rule.dims)

    @property
    def layer_rules(self) -> tuple[TensorRule, ...]:
        """The tensors of each layer, in order of use."""
        return ARCHITECTURES[self.architecture].layer_tensors

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
    return f"blk.{layer}.{rule.role}.weight"


def head_tensor_name(rule: TensorRule) -> str:
    """The name in a GGUF file of a tensor of the head unit."""
    return f"{rule.role}.weight"


def model_config(gguf: GgufFile, freq_factors: NDArray[np.float32] | None) -> ModelConfig:
    """The shape of the model in a GGUF file; everything the engine relies on is checked here.

    Args:
        freq_factors: contents of `rope_freqs.weight`, (rope dimensions / 2,), or None if the file has none.

    Raises:
        FormatError: `unsupported_architecture` for what the engine would compute wrongly, naming it;
            `unsupported_type` naming tensor and type; `invalid_model` for a missing or misshapen tensor
            or metadata key, naming it.
    """
    keys = _Keys(gguf)
    keys.refuse_what_is_not_computed()
    config = _config(keys, freq_factors)
    _check_tensors(gguf, config)
    return config


class _Keys:
    """Metadata of one file, with the architecture's prefix added and types checked."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf = gguf
        self.architecture = self._architecture()

    def invalid(self, reason: str) -> FormatError:
        return FormatError(f"{self.gguf.name}: {reason}", path=self.gguf.name)

    def unsupported(self, reason: str) -> FormatError:
        return FormatError(
            f"{self.gguf.name}: {reason}",
            code="unsupported_architecture",
            path=self.gguf.name,
            architecture=self.architecture,
        )

    def get(self, key: str) -> MetaValue | None:
        return self.gguf.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero; an array if all layers have the same."""
        value = self._uniform(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise self.invalid(f"{self.architecture}.{key} is {_shown(value)}, not a number above zero")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(f"{self.architecture}.{key} is {_shown(value)}, not a number")
        return float(value)

    def refuse_what_is_not_computed(self) -> None:
        """Raise `unsupported_architecture` for metadata that the engine would ignore at the answer's cost."""
        experts = self.get("expert_count")
        if experts:
            raise self.unsupported(
                f"a mixture of {_shown(experts)} experts ({self.architecture}) is not supported"
            )
        for key, harmless in NEUTRAL_METADATA.items():
            value = self.get(key)
            if value is not None and value not in harmless:
                raise self.unsupported(f"{self.architecture}.{key} = {_shown(value)} is not supported")
        window = self.get("attention.sliding_window")
        if window and self.count("attention.sliding_window") < self.count("context_length"):
            raise self.unsupported(f"a sliding window of {window} tokens is not supported")

    def _architecture(self) -> str:
        self._refuse_split()
        architecture = self.gguf.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise self.invalid(f"general.architecture is {_shown(architecture)}, not a name")
        if architecture not in ARCHITECTURES:
            raise FormatError(
                f"{self.gguf.name}: unsupported architecture {quoted(architecture)}; "
                f"supported: {', '.join(ARCHITECTURES)}",
                code="unsupported_architecture",
                path=self.gguf.name,
                architecture=architecture,
            )
        return architecture

    def _refuse_split(self) -> None:
        parts = self.gguf.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            number = self.gguf.metadata.get("split.no", 0)
            part = number + 1 if isinstance(number, int) else 0  # split.no counts from 0, file names from 1
            others = ", ".join(_part_names(self.gguf.name, part, parts))
            raise self.invalid(
                f"part {part} of a model in {parts} files (others: {others}); "
                "merge them first: llama-gguf-split --merge"
            )

    def _uniform(self, key: str) -> MetaValue | None:
        value = self.get(key)
        if not isinstance(value, tuple):
            return value
        if len(set(value)) != 1:
            raise self.unsupported(f"{self.architecture}.{key} differs between layers")
        return value[0]


def _config(keys: _Keys, freq_factors: NDArray[np.float32] | None) -> ModelConfig:
    embedding = keys.gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.invalid("tensor 'token_embd.weight' is missing")
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    head_dim = _head_dim(keys, hidden_size, num_heads)
    try:
        return ModelConfig(
            architecture=keys.architecture,
            name=_name(keys.gguf),
            num_layers=keys.count("block_count"),
            hidden_size=hidden_size,
            ffn_size=keys.count("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=keys.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=_vocab_size(keys, embedding),
            context_length=keys.count("context_length"),
            rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
            rope=_rope(keys, head_dim, freq_factors),
            tied_output="output.weight" not in keys.gguf.tensors,
        )
    except ValueError as error:
        raise keys.invalid(str(error)) from None


def _name(gguf: GgufFile) -> str:
    name = gguf.metadata.get("general.name")
    return name if isinstance(name, str) and name else PurePath(gguf.name).stem


def _head_dim(keys: _Keys, hidden_size: int, num_heads: int) -> int:
    """Channels of one head: told by the file, else hidden / heads."""
    if keys.get("attention.key_length") is None and hidden_size % num_heads:
        raise keys.invalid(f"a hidden size of {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    value_dim = keys.count("attention.value_length", hidden_size // num_heads)
    if value_dim != head_dim:
        raise keys.unsupported(f"keys of {head_dim} channels with values of {value_dim} are not supported")
    return head_dim


def _vocab_size(keys: _Keys, embedding: TensorInfo) -> int:
    """Rows of the embedding; there may be more than tokens (padding), never fewer."""
    vocab_size = keys.count("vocab_size", embedding.rows)
    tokens = keys.gguf.metadata.get("tokenizer.ggml.tokens", ())
    num_tokens = len(tokens) if isinstance(tokens, tuple) else 0
    if vocab_size != embedding.rows or num_tokens > vocab_size:
        raise keys.invalid(
            f"the embedding has {embedding.rows} rows for a vocabulary of {max(vocab_size, num_tokens)}"
        )
    return vocab_size


def _rope(keys: _Keys, head_dim: int, freq_factors: NDArray[np.float32] | None) -> RopeConfig:
    dimensions = keys.count("rope.dimension_count", head_dim)
    scale = _linear_scale(keys)
    factors = None if freq_factors is None else tuple(float(factor) * scale for factor in freq_factors)
    if factors is None and scale != 1.0:
        factors = (scale,) * (dimensions // 2)  # position / scale is the same as all frequencies / scale
    style = ARCHITECTURES[keys.architecture].rope_style
    return RopeConfig(style, keys.number("rope.freq_base", ROPE_BASE_DEFAULT), dimensions, factors)


def _linear_scale(keys: _Keys) -> float:
    """By how much positions are divided; other ways of stretching the context are refused."""
    kind = keys.get("rope.scaling.type") or "linear"
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise keys.unsupported(f"RoPE scaling of type {_shown(kind)} is not supported")
    scale = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    return scale or 1.0  # converters write 0 for none


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
        raise FormatError(f"{gguf.name}: tensor {quoted(name)} is missing", path=gguf.name, tensor=name)
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


def _trimmed(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing ones, which some writers add."""
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return dims


def _part_names(name: str, part: int, parts: int) -> list[str]:
    """The other files of a split model, by the usual naming; at most eight are listed."""
    stem = PurePath(name).name.removesuffix(".gguf").removesuffix(f"-{part:05d}-of-{parts:05d}")
    numbers = [number for number in range(1, min(parts, 9) + 1) if number != part]
    return [f"{stem}-{number:05d}-of-{parts:05d}.gguf" for number in numbers]


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"no model has {what}")


def _shown(value: MetaValue | None) -> str:
    return "missing" if value is None else f"{value!a:.60}"
