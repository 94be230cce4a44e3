"""Owns making a weight store from GGUF files: one pass over the source, in pieces of a few MiB."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mzd import native
from mzd.errors import FormatError
from mzd.formats.architectures import TensorRule
from mzd.formats.crc32c import concatenated
from mzd.formats.ggml_types import GgmlType
from mzd.formats.gguf import GgufFile, TensorInfo, parse_gguf, quoted
from mzd.formats.gguf_split import joined
from mzd.formats.model_config import (
    ROPE_FREQS_TENSOR,
    ModelConfig,
    head_tensor_name,
    layer_tensor_name,
    model_config,
)
from mzd.formats.quantization import dequantize
from mzd.formats.weight_layout import ROWS_PER_GROUP, repack
from mzd.formats.weight_store import (
    FORMAT_VERSION,
    HEADER_BYTES,
    SourceFile,
    StoreIndex,
    TensorSpec,
    UnitExtent,
    UnitPlan,
    encode_header,
    encode_index,
    model_id,
    plan_head,
    plan_layer,
)
from mzd.model.atomic_file import AtomicFile
from mzd.model.source_file import Progress, SourceReader, source_paths
from mzd.model.tokenizer import Tokenizer

# Rows packed at a time. Packing holds the source, the packed bytes and a copy between: some 25 MiB however
# large the matrix, where an embedding as a whole would take gigabytes.
SLICE_BYTES = 8 * 1024**2


@dataclass(frozen=True, slots=True)
class _Move:
    """One tensor's way from the source to its place in a unit."""

    source: TensorInfo
    unit: UnitPlan
    spec: TensorSpec
    is_vector: bool

    @property
    def target_bytes(self) -> int:
        """Offset in the store of the tensor's first byte."""
        return self.unit.offset_bytes + self.spec.offset_bytes


def import_gguf(path: Path, store_path: Path, *, progress: Progress | None = None) -> StoreIndex:
    """Make the weight store of a GGUF file; `store_path` is replaced only by a whole one.

    The source is the file, or all files of a split model, one after another in the order of their numbers:
    its size and SHA-256, and with them `model_id`, are those of `cat NAME-*.gguf`, whichever part was given.

    Args:
        path: the GGUF file, or any part of a split one; read once, front to back, and hashed on the way.
        store_path: where the store goes; its directory is made (0700) if missing.
        progress: called with (done_bytes, total_bytes) of the source; what it raises stops the import.

    Returns:
        The index of the new store.

    Raises:
        MzdError: `not_found`, `invalid_model` (naming a part that is missing or has no place here),
            `unsupported_architecture`, `unsupported_type` for the source; `model_changed` if it changes
            meanwhile; `weights_unavailable` if the store cannot be written (disk full). Nothing is left
            behind then.
    """
    paths = source_paths(path)
    with SourceReader(paths, progress) as source:
        gguf = joined(
            [parse_gguf(p.read_at, p.size_bytes, name=_printable(str(p.path))) for p in source.parts]
        )
        config = model_config(gguf, _freq_factors(source, gguf))
        _check_tokenizer(gguf)
        units, moves = _plan(gguf, config)
        with AtomicFile(store_path) as store:
            store.reserve(units[-1].end_bytes)
            checksums = _move_tensors(source, store, moves)
            origin = SourceFile(_printable(paths[0].name), source.size_bytes, source.finish())
            index = _index(config, units, checksums, origin, gguf)
            _write_index(store, index, units[-1].end_bytes)
            store.commit()
    return index


def _printable(name: str) -> str:
    """A file's name as text that can be stored and shown, whatever bytes it has."""
    return os.fsencode(name).decode(errors="replace")


def _freq_factors(source: SourceReader, gguf: GgufFile) -> NDArray[np.float32] | None:
    """The divisors of RoPE frequencies that llama3 scaling stores as a tensor, or None."""
    tensor = gguf.tensors.get(ROPE_FREQS_TENSOR)
    if tensor is None:
        return None
    if tensor.type is not GgmlType.F32:
        raise FormatError(
            f"{gguf.name}: tensor {ROPE_FREQS_TENSOR!r} has the type {tensor.type.name}, not F32",
            code="unsupported_type",
            path=gguf.name,
            tensor=ROPE_FREQS_TENSOR,
        )
    return np.frombuffer(source.read_at(tensor.offset_bytes, tensor.size_bytes), "<f4").astype(np.float32)


def _check_tokenizer(gguf: GgufFile) -> None:
    """Refuse a tokenizer that could not be used later; a file without any can be computed, but not served."""
    if not any(key.startswith("tokenizer.ggml.") for key in gguf.metadata):
        return
    try:
        Tokenizer.from_metadata(gguf.metadata)
    except FormatError as error:
        raise FormatError(f"{gguf.name}: {error.message}", path=gguf.name, **error.data) from error


def _plan(gguf: GgufFile, config: ModelConfig) -> tuple[list[UnitPlan], list[_Move]]:
    """All units, layers first, and the tensors to move in the order of the source."""
    units: list[UnitPlan] = []
    moves: list[_Move] = []
    end_bytes = HEADER_BYTES
    for layer in range(config.num_layers):
        names = _layer_names(layer)
        units.append(plan_layer(config, _types(gguf, names), end_bytes))
        moves += _moves(gguf, units[-1], config.layer_rules, names)
        end_bytes = units[-1].end_bytes
    units.append(plan_head(config, _types(gguf, head_tensor_name), end_bytes))
    moves += _moves(gguf, units[-1], config.head_rules, head_tensor_name)
    return units, sorted(moves, key=lambda move: move.source.offset_bytes)


def _layer_names(layer: int) -> Callable[[TensorRule], str]:
    return lambda rule: layer_tensor_name(layer, rule)


def _types(gguf: GgufFile, name_of: Callable[[TensorRule], str]) -> Callable[[TensorRule], GgmlType]:
    return lambda rule: gguf.tensors[name_of(rule)].type


def _moves(
    gguf: GgufFile, unit: UnitPlan, rules: Sequence[TensorRule], name_of: Callable[[TensorRule], str]
) -> Iterator[_Move]:
    for rule, spec in zip(rules, unit.tensors, strict=True):
        yield _Move(gguf.tensors[name_of(rule)], unit, spec, rule.is_vector)


def _move_tensors(
    source: SourceReader, store: AtomicFile, moves: Sequence[_Move]
) -> Mapping[tuple[int, str], int]:
    """Pack every tensor into its place; the CRC32C of each, by unit offset and role."""
    checksums: dict[tuple[int, str], int] = {}
    for move in moves:
        source.skip_to(move.source.offset_bytes)
        crc = 0
        target_bytes = move.target_bytes
        for packed in _packed_slices(source, move):
            store.write_at(target_bytes, packed.data)
            crc = _crc32c(packed, crc)
            target_bytes += packed.size
        checksums[move.unit.offset_bytes, move.spec.role] = crc
    return checksums


def _packed_slices(source: SourceReader, move: _Move) -> Iterator[NDArray[np.uint8]]:
    """The tensor as it lies in the store, in pieces of whole row groups; consumes it from the source."""
    type, cols = move.source.type, move.spec.cols
    if move.is_vector:
        values = dequantize(type, source.read_next(move.source.size_bytes), cols)
        if not np.isfinite(values).all():
            raise FormatError(f"tensor {quoted(move.source.name)} holds what is no finite number")
        yield values.view(np.uint8)
        return
    row_bytes = type.row_bytes(cols)
    slice_rows = max(SLICE_BYTES // row_bytes // ROWS_PER_GROUP, 1) * ROWS_PER_GROUP
    for row in range(0, move.spec.rows, slice_rows):
        rows = min(slice_rows, move.spec.rows - row)
        yield repack(type, source.read_next(rows * row_bytes), rows, cols)


def _index(
    config: ModelConfig,
    units: Sequence[UnitPlan],
    checksums: Mapping[tuple[int, str], int],
    source: SourceFile,
    gguf: GgufFile,
) -> StoreIndex:
    *layers, head = (_extent(unit, checksums) for unit in units)
    tokenizer = {key: value for key, value in gguf.metadata.items() if key.startswith("tokenizer.")}
    identity = model_id(source.sha256)
    return StoreIndex(FORMAT_VERSION, identity, config, tuple(layers), head, source, tokenizer)


def _extent(unit: UnitPlan, checksums: Mapping[tuple[int, str], int]) -> UnitExtent:
    """Join the checksums of a unit's tensors, and of the zeros between them, in order of offset."""
    crc = end_bytes = 0
    for spec in unit.tensors:
        crc = _crc32c(np.zeros(spec.offset_bytes - end_bytes, np.uint8), crc)
        crc = concatenated(crc, checksums[unit.offset_bytes, spec.role], spec.size_bytes)
        end_bytes = spec.offset_bytes + spec.size_bytes
    return unit.with_checksum(_crc32c(np.zeros(unit.size_bytes - end_bytes, np.uint8), crc))


def _write_index(store: AtomicFile, index: StoreIndex, offset_bytes: int) -> None:
    encoded = encode_index(index)
    store.write_at(offset_bytes, encoded)
    store.write_at(0, encode_header(offset_bytes, encoded))


def _crc32c(data: NDArray[np.uint8], seed: int) -> int:
    return native.crc32c_buffer(data.data, seed)
