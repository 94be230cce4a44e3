"""Owns models without a source: GGUF files of a given geometry, their weights drawn from a seed."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.synthetic_vocabulary import vocabulary_metadata
from mzd.formats.architectures import ARCHITECTURES, HEAD_TENSORS, TensorRule
from mzd.formats.ggml_types import GgmlType
from mzd.formats.model_config import head_tensor_name, layer_tensor_name

_MAGIC: Final = b"GGUF"
_VERSION: Final = 3
_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9  # GGUF numbers of metadata types
_ALIGNMENT_BYTES: Final = 32
_PATTERN_BLOCKS: Final = 160_001
_BLOCK_WEIGHTS: Final = 32
"""Weights drawn once and repeated. An odd number of blocks, and more of them than a vocabulary has rows, so
that no two rows of a matrix are the same."""

_MATRIX_BLOCKS: Final = 701
"""From the beginning of one matrix to that of the next: layers differ."""

Value = str | int | float | Sequence[str] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a model with a tied embedding; names as in `ModelConfig`."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int

    def dims(self, rule: TensorRule) -> list[int]:
        """The dimensions of a tensor, in GGUF order."""
        sizes = {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "q": self.num_heads * self.head_dim,
            "kv": self.num_kv_heads * self.head_dim,
            "head": self.head_dim,
            "vocab": self.vocab_size,
        }
        return [sizes[name] for name in rule.dims]

    def metadata(self) -> Mapping[str, Value]:
        """The keys that a reader needs, mzd's or llama.cpp's."""
        sizes = {
            "block_count": self.num_layers,
            "context_length": self.context_length,
            "embedding_length": self.hidden_size,
            "feed_forward_length": self.ffn_size,
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self.num_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": 1e6,
        }
        named = {f"{self.architecture}.{key}": value for key, value in sizes.items()}
        general = {"general.architecture": self.architecture, "general.name": self.name}
        return {**general, **named, **vocabulary_metadata(self.vocab_size)}

    def tensors(self) -> Iterator[tuple[str, TensorRule]]:
        """All tensors, in the order in which they are written."""
        for rule in HEAD_TENSORS:
            yield head_tensor_name(rule), rule
        for layer in range(self.num_layers):
            for rule in ARCHITECTURES[self.architecture].layer_tensors:
                yield layer_tensor_name(layer, rule), rule


GEOMETRIES: Final[Mapping[str, Geometry]] = {
    geometry.name: geometry
    for geometry in (
        Geometry("smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49_152, 8192),
        Geometry("qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960),
        Geometry("exaone-4.0-1.2b", "exaone4", 30, 2048, 4096, 32, 8, 64, 102_400, 65_536),
    )
}
"""Shapes of models, as their configurations have them."""


def write_model(path: Path, geometry: Geometry, *, seed: int, type: GgmlType = GgmlType.F16) -> None:
    """Write a GGUF file: matrices around zero, scaled so that activations keep their size; norms one.

    Args:
        type: of the matrices, F16 or Q8_0.
    """
    weights = _DrawnWeights(seed, type)
    with path.open("wb") as file:
        file.write(_header(geometry, type))
        for number, (_, rule) in enumerate(geometry.tensors()):
            _pad(file)
            dims = geometry.dims(rule)
            if rule.is_vector:
                file.write(np.ones(dims, "<f4").tobytes())
            else:
                weights.write(file, int(np.prod(dims)), dims[0], number)


def _header(geometry: Geometry, type: GgmlType) -> bytes:
    """Magic, counts, metadata and the table of tensors."""
    metadata, tensors = geometry.metadata(), list(geometry.tensors())
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    parts += [_string(key) + _value(value) for key, value in metadata.items()]
    offset_bytes = 0
    for name, rule in tensors:
        dims = geometry.dims(rule)
        kind = GgmlType.F32 if rule.is_vector else type
        parts.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset_bytes))
        offset_bytes += _aligned(kind.row_bytes(int(np.prod(dims))))
    return b"".join(parts)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Value) -> bytes:
    """A metadata value behind the number of its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    kind = _I32 if value and isinstance(value[0], int) else _STRING
    items = b"".join(_string(item) if isinstance(item, str) else struct.pack("<i", item) for item in value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_aligned(file.tell()) - file.tell()))


class _DrawnWeights:
    """Blocks drawn once and written over and over, from another one on for each matrix."""

    def __init__(self, seed: int, type: GgmlType) -> None:
        self._type = type
        self._pattern = np.random.default_rng(seed).standard_normal(
            (_PATTERN_BLOCKS, _BLOCK_WEIGHTS), dtype=np.float32
        )
        self._encoded: dict[int, NDArray[np.uint8]] = {}

    def write(self, file: BinaryIO, num_weights: int, cols: int, number: int) -> None:
        """Write the matrix of that number, of rows of `cols`."""
        blocks = self._scaled(cols)
        start = number * _MATRIX_BLOCKS % len(blocks)
        num_blocks = num_weights // _BLOCK_WEIGHTS
        while num_blocks:
            part = blocks[start : start + num_blocks]
            file.write(part.data)
            num_blocks -= len(part)
            start = 0

    def _scaled(self, cols: int) -> NDArray[np.uint8]:
        """(blocks, block bytes) uint8: all of them, for rows of `cols`."""
        if cols not in self._encoded:
            self._encoded[cols] = _encoded(self._type, self._pattern / np.sqrt(cols, dtype=np.float32))
        return self._encoded[cols]


def _encoded(type: GgmlType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, 32) weights as they lie in a file, (n, bytes)."""
    if type is GgmlType.F16:
        return values.astype("<f2").view(np.uint8)
    if type is not GgmlType.Q8_0:
        raise ValueError(f"synthetic weights of type {type.name}")
    encoded = np.zeros(len(values), [("scale", "<f2"), ("quants", "i1", _BLOCK_WEIGHTS)])
    encoded["scale"] = np.abs(values).max(axis=1) / 127
    encoded["quants"] = np.rint(values / encoded["scale"].astype(np.float32)[:, None]).clip(-127, 127)
    return encoded.view(np.uint8).reshape(len(values), -1)
