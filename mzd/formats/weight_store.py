"""Owns the format of the weight store: where each unit lies in the file, and the index that says so.

    0         header: magic, versions, where the index is, its SHA-256; one block of 4096 bytes, written last
    4096      one extent a layer, in order, then one for the head unit; each a multiple of 4096 (direct I/O)
    ...       the index, MessagePack

An extent holds its tensors in order of use, each at a multiple of 64 bytes: matrices as `weight_layout` packs
them, vectors (norms) as plain float32. Offsets are not stored: they follow from shapes and types, so that a
damaged index cannot point to a wrong place.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgpack

from mzd.errors import FormatError
from mzd.formats.architectures import TensorRule
from mzd.formats.ggml_types import TYPES_BY_NUMBER, GgmlType
from mzd.formats.gguf import MetaValue
from mzd.formats.layer_config import LayerConfig, RopeConfig
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_layout import ALIGNMENT_BYTES, LAYOUT_VERSION, packed_size_bytes

MAGIC = b"MZDWGHT\0"
FORMAT_VERSION = 2
EXTENT_ALIGNMENT_BYTES = 4096  # what direct I/O asks of offsets and sizes on any common block device
HEADER_BYTES = EXTENT_ALIGNMENT_BYTES
INDEX_BYTES_MAX = 128 * 1024**2  # above any vocabulary

_HEADER = struct.Struct("<8sIIQQ32s")  # magic, format version, layout version, index offset, size, sha256
_T = TypeVar("_T", int, float, str, bool, tuple[Any, ...], dict[Any, Any])


class StoreVersionError(FormatError):
    """A store that another version of mzd made: sound, but to be made anew from its GGUF file."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor inside a unit.

    Attributes:
        role: `attn_norm`, `attn_q`, ..., `token_embd`, `output_norm`, `output`.
        rows, cols: of a matrix of `rows` outputs; a vector (norm) is one row of F32.
        offset_bytes: inside its unit, a multiple of 64.
        size_bytes: packed, without the padding up to the next tensor.
    """

    role: str
    type: GgmlType
    rows: int
    cols: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Where a unit will lie in the file: an extent before its checksum is known."""

    offset_bytes: int
    size_bytes: int
    tensors: tuple[TensorSpec, ...]

    @property
    def end_bytes(self) -> int:
        """Offset in the file of the first byte behind the extent."""
        return self.offset_bytes + self.size_bytes

    def with_checksum(self, crc32c: int) -> UnitExtent:
        """The extent, once its contents are known."""
        return UnitExtent(self.offset_bytes, self.size_bytes, crc32c, self.tensors)


@dataclass(frozen=True, slots=True)
class UnitExtent:
    """Where a layer, or the head unit, lies in the file.

    Attributes:
        offset_bytes, size_bytes: multiples of 4096; the padding is zero.
        crc32c: of all `size_bytes` bytes.
        tensors: in order of use and of offset.
    """

    offset_bytes: int
    size_bytes: int
    crc32c: int
    tensors: tuple[TensorSpec, ...]

    def tensor(self, role: str) -> TensorSpec:
        """The tensor of this role. Raises FormatError if the unit has none."""
        for tensor in self.tensors:
            if tensor.role == role:
                return tensor
        raise FormatError(f"the unit has no tensor {role!r}", role=role)

    def has(self, role: str) -> bool:
        """Whether the unit has a tensor of this role."""
        return any(tensor.role == role for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """What a store was made from: a GGUF file, or the parts of a split one.

    Attributes:
        name: of the file, or of the first part.
        size_bytes, sha256: of the file, or of all parts one after another; the hash in hex.
    """

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoreIndex:
    """Everything about a model but its weights.

    Attributes:
        model_id: see `model_id`; contexts belong to one.
        tokenizer: the `tokenizer.*` metadata of the GGUF file; arrays are tuples.
    """

    format_version: int
    model_id: str
    config: ModelConfig
    layers: tuple[UnitExtent, ...]
    head: UnitExtent
    source: SourceFile
    tokenizer: Mapping[str, MetaValue]


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """Where the index lies in the file, and its SHA-256."""

    offset_bytes: int
    size_bytes: int
    sha256: bytes


def model_id(source_sha256: str) -> str:
    """The identity, in hex, of a model's weights in this layout: another layout may compute other bits."""
    return hashlib.sha256(f"{source_sha256}:{LAYOUT_VERSION}".encode()).hexdigest()


def plan_layer(config: ModelConfig, type_of: Callable[[TensorRule], GgmlType], offset_bytes: int) -> UnitPlan:
    """Lay out one layer at `offset_bytes`; `type_of` tells the type of each matrix."""
    return _plan_unit(config, config.layer_rules, type_of, offset_bytes)


def plan_head(config: ModelConfig, type_of: Callable[[TensorRule], GgmlType], offset_bytes: int) -> UnitPlan:
    """Lay out the head unit at `offset_bytes`; `type_of` tells the type of each matrix."""
    return _plan_unit(config, config.head_rules, type_of, offset_bytes)


def encode_header(index_offset_bytes: int, index: bytes) -> bytes:
    """The first 4096 bytes of a store whose encoded index lies at `index_offset_bytes`."""
    digest = hashlib.sha256(index).digest()
    fields = (MAGIC, FORMAT_VERSION, LAYOUT_VERSION, index_offset_bytes, len(index), digest)
    return _HEADER.pack(*fields).ljust(HEADER_BYTES, b"\0")


def decode_header(block: bytes, file_bytes: int) -> IndexPlace:
    """Find the index from the first bytes of a store.

    Args:
        block: the first `HEADER_BYTES` of the file, or all of a shorter one.
        file_bytes: size of the file.

    Raises:
        StoreVersionError: made by another version.
        FormatError: `weights_unavailable`; no store, or a damaged one.
    """
    if len(block) < _HEADER.size or not block.startswith(MAGIC):
        raise _damaged(f"its {file_bytes} bytes begin with {block[:8].hex(' ') or 'nothing'}")
    _, version, layout, offset_bytes, size_bytes, digest = _HEADER.unpack_from(block)
    if (version, layout) != (FORMAT_VERSION, LAYOUT_VERSION):
        raise StoreVersionError(
            f"the weight store has format {version} and layout {layout}, this mzd makes "
            f"{FORMAT_VERSION} and {LAYOUT_VERSION}: it must be made anew from the GGUF file",
            code="weights_unavailable",
        )
    if size_bytes > INDEX_BYTES_MAX or offset_bytes + size_bytes > file_bytes:
        raise _damaged(f"its index ends at byte {offset_bytes + size_bytes} of {file_bytes}")
    return IndexPlace(offset_bytes, size_bytes, digest)


def encode_index(index: StoreIndex) -> bytes:
    """The index as MessagePack; `decode_index` is the inverse."""
    fields = {
        "format_version": index.format_version,
        "model_id": index.model_id,
        "config": asdict(index.config),
        "layers": [_encode_unit(unit) for unit in index.layers],
        "head": _encode_unit(index.head),
        "source": asdict(index.source),
        "tokenizer": dict(index.tokenizer),
    }
    encoded: bytes = msgpack.packb(fields)
    return encoded


def decode_index(data: bytes, place: IndexPlace) -> StoreIndex:
    """Read an index back, trusting nothing in it.

    Args:
        data: what lies at `place`.

    Raises:
        FormatError: `weights_unavailable`; damaged, or not what this version writes.
    """
    if len(data) != place.size_bytes or hashlib.sha256(data).digest() != place.sha256:
        raise _damaged("its index does not match its checksum")
    try:
        fields = msgpack.unpackb(data, use_list=False)
        return _decode_fields(fields, place.offset_bytes)
    except (FormatError, ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
        raise _damaged(f"its index cannot be right: {error}") from error


def _plan_unit(
    config: ModelConfig,
    rules: Sequence[TensorRule],
    type_of: Callable[[TensorRule], GgmlType],
    offset_bytes: int,
) -> UnitPlan:
    tensors: list[TensorSpec] = []
    end_bytes = 0
    for rule in rules:
        start_bytes = _aligned(end_bytes, ALIGNMENT_BYTES)
        tensors.append(_plan_tensor(config, rule, type_of, start_bytes))
        end_bytes = start_bytes + tensors[-1].size_bytes
    return UnitPlan(offset_bytes, _aligned(end_bytes, EXTENT_ALIGNMENT_BYTES), tuple(tensors))


def _plan_tensor(
    config: ModelConfig, rule: TensorRule, type_of: Callable[[TensorRule], GgmlType], offset_bytes: int
) -> TensorSpec:
    cols, *rest = config.dims(rule)
    if rule.is_vector:
        return TensorSpec(rule.role, GgmlType.F32, 1, cols, offset_bytes, cols * 4)
    (rows,) = rest
    type = type_of(rule)
    return TensorSpec(rule.role, type, rows, cols, offset_bytes, packed_size_bytes(type, rows, cols))


def _aligned(size_bytes: int, alignment_bytes: int) -> int:
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def _encode_unit(unit: UnitExtent) -> dict[str, Any]:
    types = {tensor.role: int(tensor.type) for tensor in unit.tensors}
    return {"crc32c": unit.crc32c, "types": types}


def _decode_fields(fields: dict[str, Any], index_offset_bytes: int) -> StoreIndex:
    config = _decode_config(_field(fields, "config", dict))
    layers: list[UnitExtent] = []
    end_bytes = HEADER_BYTES
    for unit in _field(fields, "layers", tuple):
        layers.append(_decode_unit(config, config.layer_rules, unit, end_bytes))
        end_bytes += layers[-1].size_bytes
    head = _decode_unit(config, config.head_rules, _field(fields, "head", dict), end_bytes)
    end_bytes += head.size_bytes
    if len(layers) != config.num_layers or end_bytes > index_offset_bytes:
        raise ValueError(
            f"{len(layers)} layers end at byte {end_bytes}, the index is at {index_offset_bytes}"
        )
    source = _decode_source(_field(fields, "source", dict))
    identity = _field(fields, "model_id", str)
    if identity != model_id(source.sha256):
        raise ValueError("the identity is not that of the source")
    tokenizer = _decode_tokenizer(_field(fields, "tokenizer", dict))
    return StoreIndex(
        _field(fields, "format_version", int), identity, config, tuple(layers), head, source, tokenizer
    )


def _decode_unit(
    config: ModelConfig, rules: Sequence[TensorRule], unit: dict[str, Any], offset_bytes: int
) -> UnitExtent:
    types = _field(unit, "types", dict)
    plan = _plan_unit(config, rules, lambda rule: TYPES_BY_NUMBER[types[rule.role]], offset_bytes)
    return plan.with_checksum(_field(unit, "crc32c", int) & 0xFFFFFFFF)


def _decode_config(fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture=_field(fields, "architecture", str),
        name=_field(fields, "name", str),
        num_layers=_field(fields, "num_layers", int),
        hidden_size=_field(fields, "hidden_size", int),
        ffn_size=_field(fields, "ffn_size", int),
        num_heads=_field(fields, "num_heads", int),
        num_kv_heads=_field(fields, "num_kv_heads", int),
        head_dim=_field(fields, "head_dim", int),
        vocab_size=_field(fields, "vocab_size", int),
        context_length=_field(fields, "context_length", int),
        rms_eps=_field(fields, "rms_eps", float),
        ropes=tuple(_decode_rope(rope) for rope in _field(fields, "ropes", tuple)),
        layers=tuple(_decode_layer(layer) for layer in _field(fields, "layers", tuple)),
        attention_scale=_field(fields, "attention_scale", float),
        attention_softcap=_optional(fields, "attention_softcap", float),
        logit_softcap=_optional(fields, "logit_softcap", float),
        embedding_scale=_field(fields, "embedding_scale", float),
        tied_output=_field(fields, "tied_output", bool),
    )


def _decode_rope(fields: dict[str, Any]) -> RopeConfig:
    factors = _optional(fields, "freq_factors", tuple)
    return RopeConfig(
        fields["style"],
        _field(fields, "base", float),
        _field(fields, "dimensions", int),
        None if factors is None else tuple(float(factor) for factor in factors),
    )


def _decode_layer(fields: dict[str, Any]) -> LayerConfig:
    return LayerConfig(_optional(fields, "window", int), _optional(fields, "rope", int))


def _decode_source(fields: dict[str, Any]) -> SourceFile:
    return SourceFile(
        _field(fields, "name", str), _field(fields, "size_bytes", int), _field(fields, "sha256", str)
    )


def _decode_tokenizer(fields: dict[str, Any]) -> dict[str, MetaValue]:
    """Scalars, and tuples of scalars, as the GGUF reader gives them."""
    scalars = {bool, int, float, str}
    for key, value in fields.items():
        kinds = set(map(type, value)) if isinstance(value, tuple) else {type(value)}
        if not isinstance(key, str) or not kinds <= scalars:
            raise TypeError(f"tokenizer metadata {key!r:.60} of a wrong type")
    return fields


def _field(fields: dict[str, Any], key: str, kind: type[_T]) -> _T:
    value = fields[key]
    if type(value) is not kind:
        raise TypeError(f"{key} is {value!r:.60}, not {kind.__name__}")
    return value


def _optional(fields: dict[str, Any], key: str, kind: type[_T]) -> _T | None:
    return None if fields[key] is None else _field(fields, key, kind)


def _damaged(reason: str) -> FormatError:
    return FormatError(f"damaged weight store: {reason}", code="weights_unavailable")
