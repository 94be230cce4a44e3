"""Owns reading the header of a GGUF file, hostile until checked: metadata, and where tensors lie."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mzd.errors import FormatError
from mzd.formats.bounded_reader import BoundedReader, ReadAt
from mzd.formats.file_signatures import HEAD_BYTES, looks_like
from mzd.formats.ggml_types import TYPES_BY_NUMBER, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # their little-endian files are the same; 3 added big-endian ones

# Bounds above any model's header (a vocabulary of 262,144 with merges: 16 MB, 800,000 items), so that a huge
# hostile file costs no more than a small one.
HEADER_BYTES_MAX = 64 * 1024**2
METADATA_PAIRS_MAX = 65_536
TENSORS_MAX = 65_536
ARRAY_ITEMS_MAX = 4_194_304  # of all arrays together
DIMS_MAX = 4

_PAIR_BYTES_MIN = 8 + 1 + 4 + 1  # length and letter of the key, type, smallest value
_TENSOR_BYTES_MIN = 8 + 1 + 4 + 8 + 4 + 8  # length and letter of the name, count, one dimension, type, offset

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}

Scalar = bool | int | float | str
MetaValue = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies; checked to be inside the file and to overlap no other.

    Attributes:
        dims: GGUF order, 1 to 4 of them, none zero: dims[0] is the length of a row.
        offset_bytes: absolute in the file.
        size_bytes: whole blocks, without padding.
    """

    name: str
    dims: tuple[int, ...]
    type: GgmlType
    offset_bytes: int
    size_bytes: int

    @property
    def cols(self) -> int:
        """Weights in a row."""
        return self.dims[0]

    @property
    def rows(self) -> int:
        """Rows, over all higher dimensions."""
        return math.prod(self.dims[1:])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A checked header.

    Attributes:
        name: what errors call the file (its path).
        metadata: in file order; arrays are tuples, numbers are int or float.
        tensors: by name, in file order.
        data_offset_bytes: where the tensors' data begin.
    """

    name: str
    size_bytes: int
    version: int
    metadata: Mapping[str, MetaValue]
    tensors: Mapping[str, TensorInfo]
    alignment: int
    data_offset_bytes: int


def parse_gguf(read_at: ReadAt, size_bytes: int, *, name: str) -> GgufFile:
    """Read and check the header of a GGUF file, version 2 or 3, little-endian.

    Args:
        read_at: (offset_bytes, size_bytes) -> bytes; fewer only at the end of the file.
        size_bytes: of the file; every count in it is held against this before memory is taken.
        name: the path, for errors.

    Raises:
        FormatError: `invalid_model` with path, size and first bytes; `unsupported_type` for a tensor
            whose type has no known size.
    """
    return _HeaderParser(read_at, size_bytes, name).parse()


class _HeaderParser:
    """One pass over one header."""

    def __init__(self, read_at: ReadAt, size_bytes: int, name: str) -> None:
        self._name = name
        self._size_bytes = size_bytes
        self._head = read_at(0, min(HEAD_BYTES, size_bytes))
        self._reader = BoundedReader(read_at, min(size_bytes, HEADER_BYTES_MAX), self._fail)
        self._items_left = ARRAY_ITEMS_MAX

    def parse(self) -> GgufFile:
        version = self._version()
        num_tensors = self._count("tensor", TENSORS_MAX)
        num_pairs = self._count("metadata", METADATA_PAIRS_MAX)
        self._reader.require(num_pairs * _PAIR_BYTES_MIN + num_tensors * _TENSOR_BYTES_MIN, "the header")
        metadata = self._metadata(num_pairs)
        alignment = self._alignment(metadata)
        relative = self._tensors(num_tensors, alignment)
        data_offset_bytes = -(-self._reader.offset_bytes // alignment) * alignment
        tensors = self._placed(relative, data_offset_bytes)
        return GgufFile(
            self._name, self._size_bytes, version, metadata, tensors, alignment, data_offset_bytes
        )

    def _fail(self, reason: str, **data: Any) -> FormatError:
        """The error for `reason`, with what a person needs to recognise the file."""
        first_bytes = self._head[:16].hex(" ") or "none"
        return FormatError(
            f"{self._name}: {reason} ({self._size_bytes} bytes, first bytes: {first_bytes})",
            path=self._name,
            size_bytes=self._size_bytes,
            first_bytes=first_bytes,
            **data,
        )

    def _version(self) -> int:
        if not self._head.startswith(MAGIC):
            raise self._fail(f"not a GGUF file; it looks like {looks_like(self._head)}")
        self._reader.take(len(MAGIC), "the magic")
        version = self._reader.u32("the version")
        if version in VERSIONS:
            return version
        if version & 0xFFFF == 0 and version:  # 2 or 3 with its bytes the other way round
            raise self._fail("a big-endian GGUF file; only little-endian ones can be read")
        if version == 1:
            raise self._fail("GGUF version 1 is too old to be read; convert the model anew")
        raise self._fail(f"GGUF version {version} is unknown; versions 2 and 3 can be read")

    def _count(self, what: str, count_max: int) -> int:
        count = self._reader.u64(f"the {what} count")
        if count > count_max:
            raise self._fail(f"a {what} count of {count} is beyond any model ({count_max})")
        return count

    def _metadata(self, num_pairs: int) -> dict[str, MetaValue]:
        metadata: dict[str, MetaValue] = {}
        for index in range(num_pairs):
            key = self._reader.string(f"metadata key {index}")
            if not key or key in metadata:
                raise self._fail(f"metadata key {quoted(key)} is {'there twice' if key else 'empty'}")
            metadata[key] = self._value(quoted(key))
        return metadata

    def _value(self, key: str) -> MetaValue:
        type = self._reader.u32(f"type of {key}")
        if type == _ARRAY:
            return self._array(key)
        return self._items(type, 1, key)[0]

    def _array(self, key: str) -> tuple[Scalar, ...]:
        type = self._reader.u32(f"item type of {key}")
        count = self._reader.u64(f"length of {key}")
        if count > self._items_left:
            raise self._fail(f"{key} has {count} items; all arrays together may have {ARRAY_ITEMS_MAX}")
        self._items_left -= count
        return self._items(type, count, key)

    def _items(self, type: int, count: int, key: str) -> tuple[Scalar, ...]:
        if type == _STRING:
            return self._reader.strings(count, key)
        if type == _ARRAY:
            raise self._fail(f"{key} is an array of arrays, which no model needs")
        code = _NUMBERS.get(type)
        if code is None:
            raise self._fail(f"{key} has the unknown type {type}")
        items = struct.Struct(f"<{count}{code}")
        values = items.unpack(self._reader.take(items.size, key))
        return self._bools(values, key) if type == _BOOL else values

    def _bools(self, values: tuple[int, ...], key: str) -> tuple[bool, ...]:
        if any(value > 1 for value in values):
            raise self._fail(f"{key} holds a boolean that is neither 0 nor 1")
        return tuple(value == 1 for value in values)

    def _alignment(self, metadata: Mapping[str, MetaValue]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self._fail(f"general.alignment is {alignment!r:.40}, not a power of two")
        return alignment

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensor table; `offset_bytes` still counts from the start of the data."""
        tensors: dict[str, TensorInfo] = {}
        for index in range(num_tensors):
            tensor = self._tensor(index)
            if tensor.name in tensors:
                raise self._fail(f"tensor {quoted(tensor.name)} is there twice")
            if tensor.offset_bytes % alignment:
                raise self._fail(
                    f"tensor {quoted(tensor.name)} begins at byte {tensor.offset_bytes} of the data, "
                    f"not a multiple of {alignment}"
                )
            tensors[tensor.name] = tensor
        return tensors

    def _tensor(self, index: int) -> TensorInfo:
        name = self._reader.string(f"name of tensor {index}")
        label = f"tensor {quoted(name)}"
        dims = self._dims(label)
        type = self._type(label, self._reader.u32(f"type of {label}"))
        offset_bytes = self._reader.u64(f"offset of {label}")
        if dims[0] % type.block_weights:
            raise self._fail(
                f"{label} has rows of {dims[0]} weights, not a multiple of {type.name}'s {type.block_weights}"
            )
        size_bytes = type.row_bytes(dims[0]) * math.prod(dims[1:])
        return TensorInfo(name, dims, type, offset_bytes, size_bytes)

    def _dims(self, label: str) -> tuple[int, ...]:
        num_dims = self._reader.u32(f"dimension count of {label}")
        if not 1 <= num_dims <= DIMS_MAX:
            raise self._fail(f"{label} has {num_dims} dimensions, not 1 to {DIMS_MAX}")
        dims = tuple(self._reader.u64(f"dimensions of {label}") for _ in range(num_dims))
        if 0 in dims:
            raise self._fail(f"{label} has a dimension of zero: {list(dims)}")
        return dims

    def _type(self, label: str, number: int) -> GgmlType:
        type = TYPES_BY_NUMBER.get(number)
        if type is None:
            raise FormatError(
                f"{self._name}: {label} has the unknown type number {number}",
                code="unsupported_type",
                path=self._name,
                type=number,
            )
        return type

    def _placed(self, relative: Mapping[str, TensorInfo], data_offset_bytes: int) -> dict[str, TensorInfo]:
        """Make offsets absolute; every tensor is inside the file and overlaps none."""
        end_bytes = data_offset_bytes
        previous = ""
        placed = {name: _moved(tensor, data_offset_bytes) for name, tensor in relative.items()}
        for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset_bytes):
            if tensor.offset_bytes < end_bytes:
                raise self._fail(f"tensors {quoted(previous)} and {quoted(tensor.name)} overlap")
            end_bytes = tensor.offset_bytes + tensor.size_bytes
            previous = tensor.name
            if end_bytes > self._size_bytes:
                raise self._fail(
                    f"the data of tensor {quoted(tensor.name)} end at byte {end_bytes}, past the end "
                    "of the file: it is incomplete or damaged",
                )
        return placed


def quoted(text: str) -> str:
    """A name out of a file as errors show it: printable, and not without end."""
    return ascii(text if len(text) <= 64 else text[:61] + "...")


def _moved(tensor: TensorInfo, distance_bytes: int) -> TensorInfo:
    return TensorInfo(
        tensor.name, tensor.dims, tensor.type, tensor.offset_bytes + distance_bytes, tensor.size_bytes
    )
