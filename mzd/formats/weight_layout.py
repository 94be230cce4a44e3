"""Owns the byte layout that the matrix kernels read: eight rows side by side, scales apart from quants.

A matrix of `rows` x `cols` weights is cut into groups of eight rows (missing rows are zero). One group is

    headers   per block: each fp16 of the GGUF block header for the 8 rows, `[field][8] u16`, and of the K
              types then the scales of its sub-blocks, `[scale][8] u8`; all of them zero-padded to a
              multiple of 64 bytes. Absent for F16, BF16 and F32.
    payload   block formats: `[block][dword][8] u32`, lane r holds that dword of row r's original quants.
              F16, BF16, F32: `[k][8]` elements. Zero-padded to a multiple of 64 bytes.

Lanes are rows, so that a kernel needs no horizontal sum, loads the scales of eight rows at once, and takes
x as a broadcast. Packing moves bits and changes no value; `unpack_blocks` is its exact inverse.

The K types have blocks of 256 weights:

    Q4_K  fields scale, minimum; 8 x (scale, minimum), their 6 bits in a byte each; 32 dwords of nibbles
    Q5_K  the same, with 8 dwords of high bits in front of the nibbles, as in the file
    Q6_K  field scale; 16 x int8; per half block 16 dwords of nibbles, then 8 of high bits: together, since
          the kernels read them together
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.errors import FormatError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.k_quants import pack_scales, unpack_scales
from mzd.formats.quantization import dequantize

LAYOUT_VERSION = 2  # part of a weight store's identity: another layout is another store
ROWS_PER_GROUP = 8  # one float8: eight rows are eight lanes
ALIGNMENT_BYTES = 64  # a cache line, and a multiple of every vector load that the kernels use

# Of each half block the dwords of nibbles, then those of high bits.
_Q6_K_WORDS = (*range(16), *range(32, 40), *range(16, 32), *range(40, 48))


@dataclass(frozen=True, slots=True)
class _Block:
    """How a GGUF block splits.

    Attributes:
        header_fields: fp16 of its header.
        num_scales: one-byte scales of its sub-blocks, as the kernels read them.
        payload_count: words of quants.
        payload_type: of such a word.
        packed_scales: the file has the scales in 6 bits each (`k_quants`).
        header_last: the file has quants, scales and header in this order, else the reverse.
        payload_order: for each word of the layout its number in the file, if they differ.
    """

    header_fields: int
    payload_count: int
    payload_type: str = "<u4"
    num_scales: int = 0
    packed_scales: bool = False
    header_last: bool = False
    payload_order: tuple[int, ...] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """One GGUF block as a packed (unaligned) record."""
        scale_bytes = self.num_scales * 6 // 8 if self.packed_scales else self.num_scales
        fields: list[Any] = [
            ("header", "<u2", (self.header_fields,)),
            ("scales", "u1", (scale_bytes,)),
            ("payload", self.payload_type, (self.payload_count,)),
        ]
        return np.dtype(fields[::-1] if self.header_last else fields)

    @property
    def header_bytes(self) -> int:
        """Bytes of one block's header for eight rows."""
        return ROWS_PER_GROUP * (2 * self.header_fields + self.num_scales)

    def scales(self, blocks: NDArray[Any]) -> NDArray[np.uint8]:
        """(...,) records to (..., num_scales) uint8."""
        scales: NDArray[np.uint8] = blocks["scales"]
        if not self.packed_scales:
            return scales
        return unpack_scales(scales).reshape(*blocks.shape, self.num_scales)

    def set_scales(self, blocks: NDArray[Any], scales: NDArray[np.uint8]) -> None:
        """Undo `scales`."""
        if self.packed_scales:
            scales = pack_scales(scales.reshape(*blocks.shape, self.num_scales // 2, 2))
        blocks["scales"] = scales

    def payload(self, blocks: NDArray[Any]) -> NDArray[Any]:
        """(...,) records to (..., payload_count) words in the order of the layout."""
        words: NDArray[Any] = blocks["payload"]
        return words if self.payload_order is None else words[..., list(self.payload_order)]

    def set_payload(self, blocks: NDArray[Any], words: NDArray[Any]) -> None:
        """Undo `payload`."""
        order = slice(None) if self.payload_order is None else list(self.payload_order)
        blocks["payload"][..., order] = words


_BLOCKS = {
    GgmlType.F32: _Block(0, 1),
    GgmlType.F16: _Block(0, 1, "<u2"),
    GgmlType.BF16: _Block(0, 1, "<u2"),
    GgmlType.Q8_0: _Block(1, 8),
    GgmlType.Q4_0: _Block(1, 4),
    GgmlType.Q4_1: _Block(2, 4),
    GgmlType.Q4_K: _Block(2, 32, num_scales=16, packed_scales=True),
    GgmlType.Q5_K: _Block(2, 40, num_scales=16, packed_scales=True),
    GgmlType.Q6_K: _Block(1, 48, num_scales=16, header_last=True, payload_order=_Q6_K_WORDS),
}


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where things lie in one eight-row group; all sizes are multiples of 64 bytes.

    Attributes:
        num_blocks: blocks a row (F16, BF16, F32: columns).
        header_bytes: offset of the payload inside the group.
        size_bytes: of the whole group, and the distance to the next one.
    """

    block: _Block
    num_blocks: int
    header_bytes: int
    size_bytes: int

    @property
    def _payload_shape(self) -> tuple[int, int, int]:
        return (self.num_blocks, self.block.payload_count, ROWS_PER_GROUP)

    def headers(self, groups: NDArray[np.uint8]) -> NDArray[Any]:
        """View (num_groups, size_bytes) uint8 as (num_groups, num_blocks, field, 8) u16."""
        halves = self._header_blocks(groups)[..., : 2 * ROWS_PER_GROUP * self.block.header_fields]
        return halves.view("<u2").reshape(*halves.shape[:2], self.block.header_fields, ROWS_PER_GROUP)

    def scales(self, groups: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View (num_groups, size_bytes) uint8 as (num_groups, num_blocks, scale, 8) u8."""
        scales = self._header_blocks(groups)[..., 2 * ROWS_PER_GROUP * self.block.header_fields :]
        return scales.reshape(*scales.shape[:2], self.block.num_scales, ROWS_PER_GROUP)

    def payload(self, groups: NDArray[np.uint8]) -> NDArray[Any]:
        """View (num_groups, size_bytes) uint8 as (num_groups, num_blocks, word, 8) of the payload's type."""
        word_bytes = np.dtype(self.block.payload_type).itemsize
        end = self.header_bytes + word_bytes * int(np.prod(self._payload_shape))
        words = groups[:, self.header_bytes : end].view(self.block.payload_type)
        return words.reshape(len(groups), *self._payload_shape)

    def _header_blocks(self, groups: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View (num_groups, size_bytes) uint8 as (num_groups, num_blocks, header bytes of a block)."""
        used = groups[:, : self.num_blocks * self.block.header_bytes]
        return used.reshape(len(groups), self.num_blocks, self.block.header_bytes)


def group_layout(type: GgmlType, cols: int) -> GroupLayout:
    """The layout of one eight-row group of a matrix with `cols` weights a row.

    Raises:
        FormatError: `unsupported_type`, or `cols` is not a positive multiple of the type's block.
    """
    block = _BLOCKS.get(type)
    if block is None:
        raise FormatError(f"no kernel layout for {type.name}", code="unsupported_type", type=type.name)
    if cols <= 0 or cols % type.block_weights:
        raise FormatError(
            f"a {type.name} row has {cols} weights, not a multiple of {type.block_weights}", cols=cols
        )
    num_blocks = cols // type.block_weights
    word_bytes = np.dtype(block.payload_type).itemsize
    header_bytes = _aligned(num_blocks * block.header_bytes)
    payload_bytes = _aligned(num_blocks * block.payload_count * ROWS_PER_GROUP * word_bytes)
    return GroupLayout(block, num_blocks, header_bytes, header_bytes + payload_bytes)


def packed_size_bytes(type: GgmlType, rows: int, cols: int) -> int:
    """Bytes of a packed matrix, a multiple of 64. Raises as `group_layout`."""
    return _num_groups(rows) * group_layout(type, cols).size_bytes


def row_group_extent(type: GgmlType, rows: int, cols: int, row: int) -> tuple[int, int]:
    """(offset, size) in bytes, inside the packed matrix, of the eight-row group that holds `row`.

    Raises:
        FormatError: `row` is not in [0, rows); else as `group_layout`.
    """
    if not 0 <= row < rows:
        raise FormatError(f"row {row} of a matrix of {rows} rows", row=row, rows=rows)
    size_bytes = group_layout(type, cols).size_bytes
    return row // ROWS_PER_GROUP * size_bytes, size_bytes


def repack(type: GgmlType, raw: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.uint8]:
    """Move a matrix from GGUF blocks into the kernel layout.

    Args:
        raw: uint8, C-contiguous, any shape; rows of GGUF blocks in file order.

    Returns:
        (packed_size_bytes,) uint8, newly allocated; padding is zero.

    Raises:
        FormatError: `raw` is not exactly rows x cols weights; else as `group_layout`.
    """
    layout = group_layout(type, cols)
    expected_bytes = rows * layout.num_blocks * type.block_bytes
    if raw.size != expected_bytes:
        raise FormatError(
            f"{rows} x {cols} {type.name} weights need {expected_bytes} bytes, found {raw.size}",
            expected=expected_bytes,
            found=raw.size,
        )
    packed = np.zeros((_num_groups(rows), layout.size_bytes), np.uint8)
    blocks = raw.reshape(-1).view(layout.block.dtype).reshape(rows, layout.num_blocks)
    num_whole = rows // ROWS_PER_GROUP
    whole_rows = num_whole * ROWS_PER_GROUP
    _interleave(layout, blocks[:whole_rows], packed[:num_whole])
    if whole_rows < rows:
        last = np.zeros((ROWS_PER_GROUP, layout.num_blocks), blocks.dtype)
        last[: rows - whole_rows] = blocks[whole_rows:]
        _interleave(layout, last, packed[num_whole:])
    return packed.reshape(-1)


def unpack_blocks(type: GgmlType, packed: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.uint8]:
    """Undo `repack`: (packed_size_bytes,) uint8 back to (rows, row_bytes) uint8 of GGUF blocks, a copy.

    Raises:
        FormatError: `packed` has another size; else as `group_layout`.
    """
    layout = group_layout(type, cols)
    expected_bytes = _num_groups(rows) * layout.size_bytes
    if packed.size != expected_bytes:
        raise FormatError(
            f"{rows} x {cols} packed {type.name} weights are {expected_bytes} bytes, found {packed.size}",
            expected=expected_bytes,
            found=packed.size,
        )
    groups = packed.reshape(-1, layout.size_bytes)
    blocks = np.empty((len(groups), ROWS_PER_GROUP, layout.num_blocks), layout.block.dtype)
    blocks["header"] = layout.headers(groups).transpose(0, 3, 1, 2)
    layout.block.set_scales(blocks, layout.scales(groups).transpose(0, 3, 1, 2))
    layout.block.set_payload(blocks, layout.payload(groups).transpose(0, 3, 1, 2))
    row_bytes = layout.num_blocks * type.block_bytes
    return blocks.reshape(-1).view(np.uint8).reshape(-1, row_bytes)[:rows]


def unpack(type: GgmlType, packed: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.float32]:
    """The values of a packed matrix as (rows, cols) float32. Raises as `unpack_blocks`."""
    blocks = np.ascontiguousarray(unpack_blocks(type, packed, rows, cols)).reshape(-1)
    return dequantize(type, blocks, rows * cols).reshape(rows, cols)


def unpack_row(type: GgmlType, group: NDArray[np.uint8], cols: int, row_in_group: int) -> NDArray[np.float32]:
    """One row's values as (cols,) float32, from the (size_bytes,) uint8 of its group (`row_group_extent`).

    Raises:
        FormatError: `row_in_group` is not in [0, 8); else as `unpack_blocks`.
    """
    if not 0 <= row_in_group < ROWS_PER_GROUP:
        raise FormatError(f"row {row_in_group} of a group of {ROWS_PER_GROUP}", row=row_in_group)
    blocks = unpack_blocks(type, group, ROWS_PER_GROUP, cols)[row_in_group]
    return dequantize(type, blocks, cols)


def _interleave(layout: GroupLayout, blocks: NDArray[Any], groups: NDArray[np.uint8]) -> None:
    """Write (8 x num_groups, num_blocks) records into (num_groups, size_bytes) groups."""
    by_lane = blocks.reshape(-1, ROWS_PER_GROUP, layout.num_blocks)
    layout.headers(groups)[:] = by_lane["header"].transpose(0, 2, 3, 1)
    layout.scales(groups)[:] = layout.block.scales(by_lane).transpose(0, 2, 3, 1)
    layout.payload(groups)[:] = layout.block.payload(by_lane).transpose(0, 2, 3, 1)


def _num_groups(rows: int) -> int:
    return -(-rows // ROWS_PER_GROUP)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
