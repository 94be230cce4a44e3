"""Owns attention on the device: which kernel variant a step takes, and how the context is split."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mzd.device.kernel import BoundKernel
from mzd.device.opencl import OpenClDevice, Program
from mzd.policy.units import CHUNK_TOKENS

_ONE = (1, 1, 1)

_GROUPS_PER_COMPUTE_UNIT = 4
"""Work-items a core to aim at by splitting the context: enough that the last one to finish costs little,
few enough that the partial results stay small."""

_SUMS_MAX = {8: 12, 16: 24}
"""Vectors of sums of a register block, by lanes: with the operands beside them they fill the 16 registers
of AVX2, the 32 of AVX-512, and the 32 half as wide ones of NEON."""

_PV_CHANNELS_MAX = 8
"""Channels of a head are a multiple of 8."""

_CONVERSION_COST = 2.5
"""What a vector of float16 costs to load as float32: two instructions, on the ports that products need."""

_QUERIES_MAX = 32
"""Queries (tokens x heads of a group) of a work-item: their scores of one chunk, 1 KiB each, fit L1."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The numbers of a layer that attention depends on.

    Attributes:
        head_dim: a multiple of 8.
        scale: factor of q . k; None: 1 / sqrt(head_dim).
        softcap: a score s becomes softcap * tanh(s / softcap); None: it stays.
        window: position i sees position j only where i - j < window; None: every j <= i.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        """Factor of q . k."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def first_chunk(self, position: int) -> int:
        """The first chunk of which a token at `position`, or a later one, sees anything."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // CHUNK_TOKENS

    @property
    def tile_tokens(self) -> int:
        """Query tokens of one work-item where a step has more than one."""
        return max(tile for tile in (1, 2, 4, 8) if tile == 1 or tile * self.group <= _QUERIES_MAX)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step of `num_tokens` tokens runs.

    Attributes:
        tile_tokens: query tokens of one work-item.
        num_splits: parts of the context, merged afterwards if more than one.
        split_chunks: chunks of one part.
        first_chunk: where the first part begins; chunks before it are seen by no token of the step.
    """

    num_tokens: int
    tile_tokens: int
    num_splits: int
    split_chunks: int
    first_chunk: int

    def step(self, position: int) -> tuple[int, int, int, int, int]:
        """What the kernels read of a step whose first token is at `position`."""
        return position, self.num_tokens, self.num_splits, self.split_chunks, self.first_chunk

    @property
    def num_tiles(self) -> int:
        """Work-items along the tokens."""
        return -(-self.num_tokens // self.tile_tokens)


def plan_attention(
    shape: AttentionShape, *, num_tokens: int, context_tokens: int, compute_units: int
) -> AttentionPlan:
    """Choose tile and splits for `num_tokens` new tokens that end a context of `context_tokens`.

    Tokens fill the device first; the context is split only as far as they do not.
    """
    first_chunk = shape.first_chunk(context_tokens - num_tokens)
    num_chunks = -(-context_tokens // CHUNK_TOKENS) - first_chunk
    split_chunks = -(-num_chunks // min(_splits_wanted(shape, num_tokens, compute_units), num_chunks))
    return AttentionPlan(
        num_tokens=num_tokens,
        tile_tokens=_tile_tokens(shape, num_tokens),
        num_splits=-(-num_chunks // split_chunks),
        split_chunks=split_chunks,
        first_chunk=first_chunk,
    )


def partials_bytes(
    shape: AttentionShape, *, tokens_max: int, context_tokens_max: int, compute_units: int
) -> int:
    """Bytes of partial results that any step needs, 0 where none is split; a window needs no more."""
    chunks_max = -(-context_tokens_max // CHUNK_TOKENS)
    splits = {n: min(_splits_wanted(shape, n, compute_units), chunks_max) for n in range(1, tokens_max + 1)}
    rows = max(n * num_splits if num_splits > 1 else 0 for n, num_splits in splits.items())
    return rows * shape.num_heads * (2 + shape.head_dim) * 4


def _tile_tokens(shape: AttentionShape, num_tokens: int) -> int:
    return 1 if num_tokens == 1 else shape.tile_tokens


def _splits_wanted(shape: AttentionShape, num_tokens: int, compute_units: int) -> int:
    """Splits of the context that fill the device, however many chunks there are."""
    num_tiles = -(-num_tokens // _tile_tokens(shape, num_tokens))
    return -(-_GROUPS_PER_COMPUTE_UNIT * compute_units // (shape.num_kv_heads * num_tiles))


class Attention:
    """Attention of one layer: kernels with their arguments set, for any step.

    Args:
        step_address: (5,) int32, `AttentionPlan.step`; read by the kernels.
        chunk_table_address: (chunks,) uint64 addresses of the layer's chunks.
        q_address, out_address: (tokens, num_heads, head_dim) float32.
        partials_address: room for `partials_bytes`.
    """

    def __init__(
        self,
        device: OpenClDevice,
        shape: AttentionShape,
        *,
        step_address: int,
        chunk_table_address: int,
        q_address: int,
        out_address: int,
        partials_address: int,
    ) -> None:
        self._shape = shape
        self._by_tile: dict[int, BoundKernel] = {}
        for tile in {1, shape.tile_tokens}:
            kernel = device.kernel(_build(device, shape, tile), "attention", follows_pointers=True)
            for i, address in enumerate(
                (step_address, chunk_table_address, q_address, out_address, partials_address)
            ):
                kernel.set_address(i, address)
            self._by_tile[tile] = kernel
        self._merge = device.kernel(_build(device, shape, 1), "attention_merge")
        for i, address in enumerate((step_address, partials_address, out_address)):
            self._merge.set_address(i, address)

    def enqueue(self, plan: AttentionPlan) -> None:
        """Enqueue the step of `plan`, whose numbers are in the step buffer."""
        size = (self._shape.num_kv_heads, plan.num_tiles, plan.num_splits)
        self._by_tile[plan.tile_tokens].enqueue(size, _ONE)
        if plan.num_splits > 1:
            self._merge.enqueue((self._shape.num_heads, plan.num_tokens, 1), _ONE)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Register blocks of a variant, as attention.cl defines them."""

    queries: int
    qk_queries: int
    qk_vectors: int
    pv_queries: int
    pv_channels: int


def _build(device: OpenClDevice, shape: AttentionShape, tile: int) -> Program:
    """Build the variant for `tile` tokens a work-item."""
    lanes = device.float_lanes
    blocks = _choose_blocks(tile * shape.group, lanes)
    return device.build(
        "attention",
        HEAD_DIM=shape.head_dim,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        TILE=tile,
        LANES=lanes,
        CHUNK_TOKENS=CHUNK_TOKENS,
        QUERIES=blocks.queries,
        QK_QUERIES=blocks.qk_queries,
        QK_VECTORS=blocks.qk_vectors,
        PV_QUERIES=blocks.pv_queries,
        PV_CHANNELS=blocks.pv_channels,
        SCALE=shape.score_scale,
        **({} if shape.softcap is None else {"SOFTCAP": shape.softcap}),
        **({} if shape.window is None else {"WINDOW": shape.window}),
    )


def _choose_blocks(queries: int, lanes: int) -> _Blocks:
    """Choose the register blocks that need the fewest loads for their products."""
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
    return _Blocks(padded, qk_queries, qk_vectors, pv_queries, lanes // pv_queries)


def _pv_cost(queries: int, rows: int, channels: int) -> float:
    """Instructions a channel: products, loads of weights, conversions of values."""
    return queries + queries / channels + _CONVERSION_COST * queries / rows


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
