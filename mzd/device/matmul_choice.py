"""Owns the choice of launch shapes for products of the GPU class: by rule, and what else is worth a try.

Pure: what is measured, and how, is `autotune`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from mzd.device.matmul_shape import WeightShape, divide_up
from mzd.formats.ggml_types import GgmlType

GROUP_ROWS = 8
"""Rows of a row group, as the weight layout has it."""

BLOCK_TOKENS = 8
"""The most tokens for which one launch reads each weight once without local tiles."""

RUN_COLS = 32
"""Columns of rounded activations that share a scale (rounding_gpu.cl)."""

TOKEN_CLASSES = (1, 8, 32, 128, 512)
"""Numbers of tokens that a choice is made and measured for; each serves all down to the class below."""

LANES_PER_UNIT = 384
"""Work-items of a compute unit that hide its latency: few rows were fastest with 50 000 on 132 units."""

LANES_MIN = 32
"""Of a row group. On matrices of 50 000 rows and more 64 took 1.0-1.2 times as long, 256 1.5-3 times."""

WORK_GROUP_MAX = 256

WIDE_TILES_PER_UNIT = 0.75
"""Below as many tiles of 64 x 64, blocks of 8 tokens were faster: they keep more of the device busy."""

FULL_TILES_PER_UNIT = 1.5
"""Below as many, tiles of half the tokens were faster (0.7 of the time at 1024 rows)."""

LARGE_TILES_PER_UNIT = 3.5
"""From as many on, tiles of twice the rows were faster for float activations."""

WIDE_TOKENS_MIN = 24
"""Below it more than half of a tile would be padding."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A work-group's share of y, and a work-item's in registers (tiles_gpu.cl)."""

    rows: int
    tokens: int
    lane_rows: int
    lane_tokens: int

    @property
    def lanes(self) -> int:
        """Work-items of the work-group."""
        return self.rows // self.lane_rows * (self.tokens // self.lane_tokens)

    @property
    def local_bytes(self) -> int:
        """Local memory of the float kernel, which takes more than the int8 one: 32 columns, a quad longer."""
        return 4 * 32 * (self.rows + 4 + self.tokens + 4)


LARGE_TILE = Tile(128, 64, 8, 8)
TILE = Tile(64, 64, 8, 4)
SMALL_TILE = Tile(64, 32, 4, 4)
TILES = (TILE, SMALL_TILE, LARGE_TILE)


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """What a device allows to a work-group, and how many it runs at a time."""

    compute_units: int
    work_group_max: int
    local_bytes: int

    @property
    def work_group(self) -> int:
        """Work-items of the work-groups of all kernels without tiles: a power of two."""
        return _power_of_two_below(min(self.work_group_max, WORK_GROUP_MAX))

    def allows(self, tile: Tile) -> bool:
        """Whether a work-group of that tile can run."""
        return tile.lanes <= self.work_group_max and tile.local_bytes <= self.local_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """How one product is launched.

    Attributes:
        lanes: work-items that share a row group, where there is no tile; a power of two.
        tile: None for blocks of up to `BLOCK_TOKENS` tokens.
    """

    lanes: int
    tile: Tile | None = None


@dataclass(frozen=True, slots=True)
class ProductKey:
    """What a choice depends on, of the product. Matrices whose rows differ by less than half share one."""

    type: GgmlType
    rows_class: int
    cols: int
    tokens_class: int
    int8: bool


def product_key(spec: WeightShape, tokens_class: int, *, int8: bool) -> ProductKey:
    """The key of a matrix for one of `TOKEN_CLASSES`."""
    return ProductKey(spec.type, _power_of_two_below(spec.rows), spec.cols, tokens_class, int8)


def token_class(num_tokens: int) -> int:
    """The class that serves `num_tokens`, at least one."""
    return next((limit for limit in TOKEN_CLASSES if num_tokens <= limit), TOKEN_CLASSES[-1])


def default_choice(limits: GpuLimits, spec: WeightShape, tokens_class: int, *, int8: bool) -> Choice:
    """The choice by rule: as many lanes as keep the device busy, tiles where there are enough of them."""
    blocks = divide_up(tokens_class, BLOCK_TOKENS)
    lanes = min(_busy_lanes(limits, spec, blocks), max_lanes(limits, spec, int8=int8))
    return Choice(lanes, _default_tile(limits, spec, tokens_class, int8=int8))


def _default_tile(limits: GpuLimits, spec: WeightShape, tokens_class: int, *, int8: bool) -> Tile | None:
    tiles = divide_up(spec.rows, TILE.rows) * divide_up(tokens_class, TILE.tokens)
    per_unit = tiles / limits.compute_units
    if tokens_class < WIDE_TOKENS_MIN or per_unit < WIDE_TILES_PER_UNIT:
        return None
    preferred = TILE
    if per_unit < FULL_TILES_PER_UNIT or tokens_class <= SMALL_TILE.tokens:
        preferred = SMALL_TILE
    elif per_unit >= LARGE_TILES_PER_UNIT and not int8:
        preferred = LARGE_TILE
    return next((tile for tile in (preferred, TILE, SMALL_TILE) if limits.allows(tile)), None)


def candidates(limits: GpuLimits, spec: WeightShape, tokens_class: int, *, int8: bool) -> tuple[Choice, ...]:
    """What is worth measuring, the choice by rule first."""
    default = default_choice(limits, spec, tokens_class, int8=int8)
    if tokens_class <= BLOCK_TOKENS:
        most = max_lanes(limits, spec, int8=int8)
        others = [Choice(lanes) for lanes in (32, 64, 128, 256) if lanes <= most]
    else:
        tiles = [tile for tile in TILES if limits.allows(tile)]
        others = [Choice(default.lanes), *(Choice(default.lanes, tile) for tile in tiles)]
    return (default, *(choice for choice in others if choice != default))


def max_lanes(limits: GpuLimits, spec: WeightShape, *, int8: bool) -> int:
    """The most lanes that find work enough in a row group, as a power of two, within the work-group."""
    if int8:
        loads = spec.cols // RUN_COLS * 2  # half of the rows of a run each
    else:
        loads = (spec.cols if spec.type.block_weights == 1 else spec.cols // 4) // 2  # two loads each
    return max(2, min(limits.work_group, _power_of_two_below(loads)))


def _busy_lanes(limits: GpuLimits, spec: WeightShape, blocks: int) -> int:
    """Lanes of a row group that, with those of all row groups and blocks of tokens, fill the device."""
    lanes = LANES_PER_UNIT * limits.compute_units // (divide_up(spec.rows, GROUP_ROWS) * blocks)
    return min(limits.work_group, max(_power_of_two_above(lanes), LANES_MIN))


def _power_of_two_below(value: int) -> int:
    """The largest power of two that is not above `value`, at least 1."""
    return 1 << max(value, 1).bit_length() - 1


def _power_of_two_above(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()
