"""Owns the matrix products of the GPU class: work-groups that cooperate, launched as `matmul_choice` says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from mzd.device.kernel import BoundKernel
from mzd.device.matmul_choice import (
    BLOCK_TOKENS,
    GROUP_ROWS,
    RUN_COLS,
    TOKEN_CLASSES,
    Choice,
    GpuLimits,
    ProductKey,
    Tile,
    default_choice,
    product_key,
    token_class,
)
from mzd.device.matmul_shape import Operands, WeightShape, divide_up
from mzd.device.opencl import OpenClDevice, Program
from mzd.errors import MzdError
from mzd.formats.weight_layout import group_layout

log = logging.getLogger(__name__)

RUN_FIELD_BYTES = 4 * 11
"""Of one rounded run: its words, its scale and two sums (rounding_gpu.cl)."""

BLOCK_KERNELS = (4, 8)
"""Tokens of the kernels that read each weight once for several tokens."""

ROUNDING_GROUPS_PER_UNIT = 4
"""Work-groups per compute unit, where each rounds x for itself: all that there are took up to 1.2 times as
long at 90 000 rows and more; fewer leave the device idle."""

Choices = Mapping[ProductKey, Choice]


def gpu_limits(device: OpenClDevice) -> GpuLimits:
    """What `device` allows to the work-groups of products."""
    return GpuLimits(device.compute_units, device.work_group_max, device.local_memory_bytes)


def rounded_bytes(num_tokens: int, cols: int) -> int:
    """Memory that the products of `num_tokens` rows of `cols` activations need to keep them rounded."""
    return divide_up(num_tokens, BLOCK_TOKENS) * BLOCK_TOKENS * (cols // RUN_COLS) * RUN_FIELD_BYTES


class _Launches(Protocol):
    """The kernels of one kind of activations for one matrix shape."""

    def enqueue(self, operands: Operands, choice: Choice) -> None: ...

    def free(self) -> None: ...


class GpuProduct:
    """Products for one matrix shape: blocks of a few tokens, or tiles, by the class of the number of tokens.

    Args:
        choices: measured ones; the rest is by rule.
        rounded_address: `rounded_bytes` that launches of the same queue may share; None for its own.
    """

    def __init__(
        self,
        device: OpenClDevice,
        spec: WeightShape,
        *,
        tokens_max: int,
        int8: bool,
        choices: Choices,
        rounded_address: int | None = None,
    ) -> None:
        group_layout(spec.type, spec.cols)  # refuses what no kernel reads
        limits = gpu_limits(device)
        self._choices = _choose_all(limits, spec, tokens_max, choices, int8=int8)
        tiles = {choice.tile for choice in self._choices.values() if choice.tile is not None}
        self._launches: _Launches = (
            _Int8Launches(device, spec, limits, tiles, tokens_max, rounded_address)
            if int8
            else _ExactLaunches(device, spec, limits, tiles)
        )

    def enqueue(self, operands: Operands) -> None:
        """See `Product.enqueue`."""
        self._launches.enqueue(operands, self._choices[token_class(operands.num_tokens)])

    def free(self) -> None:
        """See `Product.free`."""
        self._launches.free()


def _choose_all(
    limits: GpuLimits, spec: WeightShape, tokens_max: int, choices: Choices, *, int8: bool
) -> dict[int, Choice]:
    """The choice for each class of tokens up to that of `tokens_max`: the measured one if it can run here."""
    chosen = {}
    for tokens_class in TOKEN_CLASSES[: TOKEN_CLASSES.index(token_class(tokens_max)) + 1]:
        choice = choices.get(product_key(spec, tokens_class, int8=int8))
        if choice is None or not _can_run(limits, choice):
            choice = default_choice(limits, spec, tokens_class, int8=int8)
        chosen[tokens_class] = choice
    return chosen


def _can_run(limits: GpuLimits, choice: Choice) -> bool:
    return choice.lanes <= limits.work_group and (choice.tile is None or limits.allows(choice.tile))


class _ExactLaunches:
    """matmul_gpu.cl and matmul_wide_gpu.cl: float activations."""

    def __init__(self, device: OpenClDevice, spec: WeightShape, limits: GpuLimits, tiles: set[Tile]) -> None:
        program = device.build("matmul_gpu", **_weights(spec), WORK_GROUP=limits.work_group)
        self._blocks = {
            tokens: _BlockKernel(device, program, f"multiply_{tokens}", spec, limits)
            for tokens in (1, *BLOCK_KERNELS)
        }
        self._tiles = {
            tile: _TileKernel(device, "matmul_wide_gpu", "multiply_wide", spec, tile) for tile in tiles
        }

    def enqueue(self, operands: Operands, choice: Choice) -> None:
        """Enqueue one launch."""
        if choice.tile is not None:
            self._tiles[choice.tile].enqueue(operands)
        else:
            block = 1 if operands.num_tokens == 1 else _block_tokens(operands.num_tokens)
            self._blocks[block].enqueue(operands, choice.lanes, block)

    def free(self) -> None:
        """Nothing was allocated."""


class _Int8Launches:
    """matmul_int8_gpu.cl and matmul_wide_int8_gpu.cl: activations rounded to 8 bits.

    One token is rounded inside the launch if local memory holds it; more are rounded by a launch before.
    """

    def __init__(
        self,
        device: OpenClDevice,
        spec: WeightShape,
        limits: GpuLimits,
        tiles: set[Tile],
        tokens_max: int,
        rounded_address: int | None,
    ) -> None:
        program = _build(device, "matmul_int8_gpu", **_weights(spec), WORK_GROUP=limits.work_group)
        self._one = _OneTokenKernel(device, program, spec, limits)
        self._blocks = {
            tokens: _BlockKernel(device, program, f"multiply_int8_{tokens}", spec, limits)
            for tokens in BLOCK_KERNELS
        }
        self._tiles = {
            tile: _TileKernel(device, "matmul_wide_int8_gpu", "multiply_wide_int8", spec, tile)
            for tile in tiles
        }
        self._rounding = _Rounding(device, program, spec.cols)
        self._own_rounded = None
        if rounded_address is None and (tokens_max > 1 or not self._one.fits):
            self._own_rounded = device.allocate_scratch(rounded_bytes(tokens_max, spec.cols))
            rounded_address = self._own_rounded.address
        self._rounded_address = rounded_address or 0

    def enqueue(self, operands: Operands, choice: Choice) -> None:
        """Enqueue one launch, or two."""
        if operands.num_tokens == 1 and self._one.fits:
            self._one.enqueue(operands, choice.lanes)
            return
        self._rounding.enqueue(operands.x, self._rounded_address, operands.num_tokens)
        rounded = operands._replace(x=self._rounded_address)
        if choice.tile is not None:
            self._tiles[choice.tile].enqueue(rounded)
        else:
            block = _block_tokens(operands.num_tokens)
            self._blocks[block].enqueue(rounded, choice.lanes, block)

    def free(self) -> None:
        """Give back the rounded tokens' memory, if it is this product's own."""
        if self._own_rounded is not None:
            self._own_rounded.free()


class _RowGroupKernel:
    """A kernel that reads each weight once; the lanes of a row group share its columns."""

    def __init__(
        self, device: OpenClDevice, program: Program, name: str, spec: WeightShape, limits: GpuLimits
    ) -> None:
        self._kernel = device.kernel(program, name)
        _set_shape(self._kernel, spec)
        self._row_groups = divide_up(spec.rows, GROUP_ROWS)
        self._work_group = limits.work_group

    def _num_work_groups(self, lanes: int) -> int:
        """Work-groups that take all row groups at once."""
        return divide_up(self._row_groups, self._work_group // lanes)

    def _enqueue(self, operands: Operands, lanes: int, work_groups: int, num_blocks: int) -> None:
        _set_operands(self._kernel, operands)
        self._kernel.set_int(6, lanes)
        self._kernel.enqueue((work_groups * self._work_group, num_blocks), (self._work_group, 1))


class _BlockKernel(_RowGroupKernel):
    """multiply_N and multiply_int8_N, of as many blocks of N tokens as there are."""

    def enqueue(self, operands: Operands, lanes: int, block: int) -> None:
        """Enqueue a launch; `block` is N."""
        self._kernel.set_int(7, operands.num_tokens)
        self._enqueue(operands, lanes, self._num_work_groups(lanes), divide_up(operands.num_tokens, block))


class _OneTokenKernel(_RowGroupKernel):
    """multiply_int8_1, each work-group of which rounds x into local memory.

    Attributes:
        fits: local memory has room for it.
    """

    def __init__(self, device: OpenClDevice, program: Program, spec: WeightShape, limits: GpuLimits) -> None:
        super().__init__(device, program, "multiply_int8_1", spec, limits)
        records_bytes = spec.cols // RUN_COLS * RUN_FIELD_BYTES
        exchange_bytes = limits.work_group // 2 * 16
        self.fits = records_bytes + exchange_bytes <= limits.local_bytes
        self._work_groups_max = ROUNDING_GROUPS_PER_UNIT * limits.compute_units
        self._kernel.set_local(7, records_bytes)

    def enqueue(self, operands: Operands, lanes: int) -> None:
        """Enqueue a launch for one token."""
        work_groups = min(self._num_work_groups(lanes), self._work_groups_max)
        self._enqueue(operands, lanes, work_groups, 1)


class _TileKernel:
    """A kernel that multiplies tiles of rows by tiles of tokens."""

    def __init__(
        self, device: OpenClDevice, source_name: str, name: str, spec: WeightShape, tile: Tile
    ) -> None:
        program = _build(
            device,
            source_name,
            **_weights(spec),
            TILE_ROWS=tile.rows,
            TILE_TOKENS=tile.tokens,
            LANE_ROWS=tile.lane_rows,
            LANE_TOKENS=tile.lane_tokens,
        )
        self._kernel = device.kernel(program, name)
        _set_shape(self._kernel, spec)
        self._tile = tile
        self._work_items = divide_up(spec.rows, tile.rows) * tile.lanes

    def enqueue(self, operands: Operands) -> None:
        """Enqueue a launch."""
        _set_operands(self._kernel, operands)
        self._kernel.set_int(6, operands.num_tokens)
        num_tiles = divide_up(operands.num_tokens, self._tile.tokens)
        self._kernel.enqueue((self._work_items, num_tiles), (self._tile.lanes, 1))


class _Rounding:
    """round_tokens: x to 8 bits, for a later launch."""

    WORK_GROUP = (BLOCK_TOKENS, 8)

    def __init__(self, device: OpenClDevice, program: Program, cols: int) -> None:
        self._kernel = device.kernel(program, "round_tokens")
        self._kernel.set_int(2, cols)
        self._work_items = divide_up(cols // RUN_COLS, self.WORK_GROUP[1]) * self.WORK_GROUP[1]

    def enqueue(self, x_address: int, rounded_address: int, num_tokens: int) -> None:
        """Enqueue a launch."""
        self._kernel.set_address(0, x_address)
        self._kernel.set_address(1, rounded_address)
        self._kernel.set_int(3, num_tokens)
        tokens = divide_up(num_tokens, BLOCK_TOKENS) * BLOCK_TOKENS
        self._kernel.enqueue((tokens, self._work_items), self.WORK_GROUP)


def _build(device: OpenClDevice, source_name: str, **defines: int) -> Program:
    """Build, without the products of bytes in one instruction if the compiler turns out not to have them."""
    try:
        return device.build(source_name, **defines)
    except MzdError as error:
        log.info("%s.cl is built without dot products of bytes: %s", source_name, error)
        return device.build(source_name, **defines, PORTABLE_DOT=1)


def _set_shape(kernel: BoundKernel, spec: WeightShape) -> None:
    kernel.set_int(3, spec.rows)
    kernel.set_int(4, spec.cols)


def _set_operands(kernel: BoundKernel, operands: Operands) -> None:
    kernel.set_address(0, operands.weights)
    kernel.set_address(1, operands.x)
    kernel.set_address(2, operands.y)
    kernel.set_int(5, int(operands.accumulate))


def _weights(spec: WeightShape) -> dict[str, int]:
    """The definition that tells kernels the weights' format."""
    return {f"WEIGHT_{spec.type.name}": 1}


def _block_tokens(num_tokens: int) -> int:
    """The kernel of `BLOCK_KERNELS` that serves several tokens with the fewest reads of the weights."""
    return next((tokens for tokens in BLOCK_KERNELS if num_tokens <= tokens), BLOCK_KERNELS[-1])
