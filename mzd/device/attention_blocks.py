"""Owns the register and local-memory blocks of the attention kernels: what is computed at once."""

from __future__ import annotations

from dataclasses import dataclass

_SUMS_MAX = {8: 12, 16: 24}
"""Vectors of sums of a register block, by lanes: with the operands beside them they fill the 16 registers
of AVX2, the 32 of AVX-512, and the 32 half as wide ones of NEON."""

_PV_CHANNELS_MAX = 8
"""Channels of a head are a multiple of 8."""

_CONVERSION_COST = 2.5
"""What a vector of float16 costs to load as float32: two instructions, on the ports that products need."""

_CPU_QUERIES_MAX = 32
"""Queries (tokens x heads of a group) of a work-item: their scores of one chunk, 1 KiB each, fit L1."""

GPU_GROUP_LANES = 128
"""Work-items of a GPU's work-group."""

_GPU_QUERIES_MAX = 16
"""Queries of a work-group: each lane has a register block of them in both passes."""

_GPU_LOCAL_BYTES_MAX = 32 * 1024
"""Local memory that any GPU has."""


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
    pass_tokens: int
    tokens_a_lane: int
    channels_a_lane: int

    @classmethod
    def choose(cls, queries: int, head_dim: int) -> GpuBlocks:
        """Choose the blocks for `queries` queries, with the longest pass that local memory holds."""
        padded = _padded(queries, 4)
        pass_tokens = next(
            tokens
            for tokens in (256, 128, 64)
            if tokens == 64 or _local_bytes(padded, head_dim, tokens) <= _GPU_LOCAL_BYTES_MAX
        )
        channels_a_lane = max((2, 4, 1), key=lambda channels: _busy_lanes(head_dim, channels, pass_tokens))
        return cls(padded, pass_tokens, 2, channels_a_lane)


def gpu_tile_tokens(group: int, head_dim: int) -> int:
    """Query tokens of one work-group where a step has more than one, for `group` heads that share K and V."""
    return max(
        tile
        for tile in range(1, _GPU_QUERIES_MAX + 1)
        if tile == 1
        or (
            tile * group <= _GPU_QUERIES_MAX
            and _local_bytes(_padded(tile * group, 4), head_dim, 64) <= _GPU_LOCAL_BYTES_MAX
        )
    )


def _local_bytes(queries: int, head_dim: int, pass_tokens: int) -> int:
    """Local memory of a work-group: queries, weights, and what the softmax shares."""
    weight_stride = queries if queries // 4 % 2 else queries + 4
    floats = head_dim * queries + pass_tokens * weight_stride + pass_tokens // 2
    return 4 * (floats + GPU_GROUP_LANES + queries)


def _busy_lanes(head_dim: int, channels_a_lane: int, pass_tokens: int) -> int:
    """Lanes that work in the value pass."""
    channel_lanes = head_dim // channels_a_lane
    return channel_lanes * min(GPU_GROUP_LANES // channel_lanes, pass_tokens // 8)


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
