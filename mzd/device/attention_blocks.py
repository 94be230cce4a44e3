"""Owns the register and local-memory blocks of the attention kernels: what is computed at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SUMS_MAX = {8: 12, 16: 24}
"""Vectors of sums of a register block, by lanes: with the operands beside them they fill the 16 registers
of AVX2, the 32 of AVX-512, and the 32 half as wide ones of NEON."""

_PV_CHANNELS_MAX = 8
"""Channels of a head are a multiple of 8."""

_CONVERSION_COST = 2.5
"""What a vector of float16 costs to load as float32: two instructions, on the ports that products need."""

_CPU_QUERIES_MAX = 32
"""Queries (tokens x heads of a group) of a work-item: their scores of one chunk, 1 KiB each, fit L1."""

_GPU_LOCAL_BYTES_MAX = 32 * 1024
"""Local memory that any GPU has."""

_SMALL_HEAD = 64
"""Channels up to which a work-group of 128 fills the score pass; larger heads take 256."""

StepSize = Literal["one", "few", "many"]
"""Tokens of a step: one is bound by memory, many by arithmetic."""

FEW_TOKENS_MAX = 32


def step_size(num_tokens: int) -> StepSize:
    """The class of a step of that many tokens."""
    if num_tokens == 1:
        return "one"
    return "few" if num_tokens <= FEW_TOKENS_MAX else "many"


def cpu_tile_tokens(group: int) -> int:
    """Query tokens of one work-item where a step has more than one, for `group` heads that share K and V."""
    return max(tile for tile in (1, 2, 4, 8) if tile == 1 or tile * group <= _CPU_QUERIES_MAX)


@dataclass(frozen=True, slots=True)
class CpuBlocks:
    """Register blocks of a variant, as attention.cl defines them."""

    queries: int
    qk_queries: int
    qk_vectors: int
    pv_queries: int
    pv_channels: int

    @classmethod
    def choose(cls, queries: int, lanes: int) -> CpuBlocks:
        """Choose the blocks that need the fewest loads for their products."""
        pv_queries = min(
            (rows for rows in (2, 4, 8) if lanes // rows <= _PV_CHANNELS_MAX),
            key=lambda rows: _pv_cost(_padded(queries, rows), rows, lanes // rows),
        )
        padded = _padded(queries, pv_queries)
        qk_queries, qk_vectors = min(
            (
                (rows, vectors)
                for rows in range(1, padded + 1)
                for vectors in (4, 2, 1)
                if padded % rows == 0 and vectors * lanes <= 32 and rows * vectors <= _SUMS_MAX[lanes]
            ),
            key=lambda block: 1 / block[1] + _CONVERSION_COST / block[0],
        )
        return cls(padded, qk_queries, qk_vectors, pv_queries, lanes // pv_queries)


def _pv_cost(queries: int, rows: int, channels: int) -> float:
    """Instructions a channel: products, loads of weights, conversions of values."""
    return queries + queries / channels + _CONVERSION_COST * queries / rows


@dataclass(frozen=True, slots=True)
class GpuBlocks:
    """Blocks of a variant, as attention_gpu.cl defines them."""

    queries: int
    group_lanes: int
    query_lanes: int
    pass_tokens: int
    tokens_a_lane: int
    channels_a_lane: int

    @classmethod
    def choose(cls, queries: int, head_dim: int, size: StepSize) -> GpuBlocks:
        """Choose the blocks for `queries` queries: the fastest on an H200, see docs/measurements.md.

        For many tokens a lane has as much arithmetic for each load as registers hold; for fewer there are
        twice the lanes where heads are large, which shortens the way through one chunk.
        """
        padded = _padded(queries, 4)
        is_memory_bound = size == "one" and padded == 4
        group_lanes = 128 if head_dim <= _SMALL_HEAD or size == "many" else 256
        return cls(
            queries=padded,
            group_lanes=group_lanes,
            query_lanes=1 << (group_lanes // padded).bit_length() - 1,
            pass_tokens=_pass_tokens(padded, head_dim, group_lanes),
            tokens_a_lane=8 if is_memory_bound and head_dim > _SMALL_HEAD else 4,
            channels_a_lane=4 if is_memory_bound else _channels_a_lane(padded, size),
        )


def _channels_a_lane(queries: int, size: StepSize) -> int:
    """Channels whose sums, with `queries` queries each, fit the registers."""
    if size == "many":
        return 8 if queries <= 8 else 4
    return 2


def gpu_tile_tokens(group: int, head_dim: int) -> int:
    """Query tokens of one work-group where a step has more than one, for `group` heads that share K and V.

    Small, because twice the tiles read K and V twice but out of the cache, and start twice the work-groups.
    """
    queries_max = 16 if head_dim <= _SMALL_HEAD else 12
    return max(tile for tile in (1, 2, 4, 8) if tile == 1 or tile * group <= queries_max)


def _pass_tokens(queries: int, head_dim: int, group_lanes: int) -> int:
    """The longest pass that local memory holds: queries, their weights, and what the softmax shares."""
    weight_stride = queries if queries // 4 % 2 else queries + 4
    fixed = head_dim * queries + group_lanes + queries
    return max(
        tokens
        for tokens in (64, 128, 256)
        if tokens == 64 or 4 * (fixed + tokens * weight_stride + tokens // 2) <= _GPU_LOCAL_BYTES_MAX
    )


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
