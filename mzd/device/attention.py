"""Owns attention on the device: which kernel target a step takes, and how the context is split."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mzd.device.attention_blocks import (
    CpuBlocks,
    GpuBlocks,
    StepSize,
    cpu_tile_tokens,
    gpu_tile_tokens,
    step_size,
)
from mzd.device.kernel import BoundKernel
from mzd.device.opencl import OpenClDevice, Program
from mzd.device.selection import KernelClass
from mzd.policy.units import CHUNK_TOKENS

_GROUPS_PER_COMPUTE_UNIT: dict[KernelClass, int] = {"cpu": 4, "gpu": 3}
"""Work-groups a compute unit to aim at by splitting the context: enough that the last one to finish costs
little, few enough that the partial results stay small."""

LAUNCH_CHUNKS = 8
"""Chunks that a launch takes as arguments, in chunks.cl."""

_FIRST_CHUNK_ARGUMENT = 4


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


@dataclass(frozen=True, slots=True)
class AttentionTarget:
    """What attention depends on of a device.

    Attributes:
        compute_units: as `OpenClDevice` has them.
        chunk_arguments: kernels take chunks as arguments, because they cannot follow addresses in a table.
    """

    compute_units: int
    kernel_class: KernelClass = "cpu"
    chunk_arguments: bool = False

    @classmethod
    def of(cls, device: OpenClDevice) -> AttentionTarget:
        """What `device` is to attention."""
        return cls(device.compute_units, device.kernel_class, device.memory_kind == "buffers")

    def tile_tokens(self, shape: AttentionShape, size: StepSize) -> int:
        """Query tokens of one work-group."""
        if size == "one":
            return 1
        if self.kernel_class == "gpu":
            return gpu_tile_tokens(shape.group, shape.head_dim)
        return cpu_tile_tokens(shape.group)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step of `num_tokens` tokens at `position` runs.

    Attributes:
        tile_tokens: query tokens of one work-group.
        num_splits: parts of a launch's chunks, merged in the end if more than one.
        split_chunks: chunks of one part.
        first_chunk: where the first part begins; chunks before it are seen by no token of the step.
        num_chunks: chunks from there to the context's end.
    """

    position: int
    num_tokens: int
    tile_tokens: int
    num_splits: int
    split_chunks: int
    first_chunk: int
    num_chunks: int

    def step(self) -> tuple[int, int, int, int, int]:
        """What the kernels read of the step."""
        return self.position, self.num_tokens, self.num_splits, self.split_chunks, self.first_chunk

    @property
    def num_tiles(self) -> int:
        """Work-groups along the tokens."""
        return -(-self.num_tokens // self.tile_tokens)

    @property
    def launches(self) -> range:
        """The first chunk of each launch; one, unless chunks are arguments."""
        launch_chunks = self.num_splits * self.split_chunks
        return range(self.first_chunk, self.first_chunk + self.num_chunks, launch_chunks)


def plan_attention(
    shape: AttentionShape, target: AttentionTarget, *, num_tokens: int, context_tokens: int
) -> AttentionPlan:
    """Choose tile and splits for `num_tokens` new tokens that end a context of `context_tokens`.

    Tokens fill the device first; the context is split only as far as they do not.
    """
    position = context_tokens - num_tokens
    first_chunk = shape.first_chunk(position)
    num_chunks = -(-context_tokens // CHUNK_TOKENS) - first_chunk
    num_splits, split_chunks = _split(target, num_chunks, _splits_wanted(shape, target, num_tokens))
    return AttentionPlan(
        position=position,
        num_tokens=num_tokens,
        tile_tokens=target.tile_tokens(shape, step_size(num_tokens)),
        num_splits=num_splits,
        split_chunks=split_chunks,
        first_chunk=first_chunk,
        num_chunks=num_chunks,
    )


def partials_bytes(
    shape: AttentionShape, target: AttentionTarget, *, tokens_max: int, context_tokens_max: int
) -> int:
    """Bytes of partial results that any step needs, 0 where none leaves any; a window needs no more."""
    chunks_max = -(-context_tokens_max // CHUNK_TOKENS)
    rows = max(
        num_tokens * _partials_max(target, chunks_max, wanted)
        for num_tokens in range(1, tokens_max + 1)
        for wanted in (_splits_wanted(shape, target, num_tokens),)
    )
    return rows * shape.num_heads * (2 + shape.head_dim) * 4


def _splits_wanted(shape: AttentionShape, target: AttentionTarget, num_tokens: int) -> int:
    """Splits of the context that fill the device, however many chunks there are."""
    num_tiles = -(-num_tokens // target.tile_tokens(shape, step_size(num_tokens)))
    groups = _GROUPS_PER_COMPUTE_UNIT[target.kernel_class] * target.compute_units
    return -(-groups // (shape.num_kv_heads * num_tiles))


def _split(target: AttentionTarget, num_chunks: int, wanted: int) -> tuple[int, int]:
    """Return splits, and the chunks of each: of the context, or of a launch where chunks are arguments."""
    if target.chunk_arguments:
        launch_chunks = min(num_chunks, LAUNCH_CHUNKS)
        split_chunks = max(launch_chunks // wanted, 1)  # rounded down: eight chunks divide evenly
        return -(-launch_chunks // split_chunks), split_chunks
    split_chunks = -(-num_chunks // min(wanted, num_chunks))
    return -(-num_chunks // split_chunks), split_chunks


def _partials_max(target: AttentionTarget, chunks_max: int, wanted: int) -> int:
    """The most splits that leave partial results, in a context of at most `chunks_max` chunks."""
    if target.chunk_arguments:
        splits = max(_split(target, n, wanted)[0] for n in range(1, min(chunks_max, LAUNCH_CHUNKS) + 1))
        return splits if splits > 1 or chunks_max > LAUNCH_CHUNKS else 0
    splits = min(wanted, chunks_max)
    return splits if splits > 1 else 0


class Attention:
    """Attention of one layer: kernels with their arguments set, for any step.

    Args:
        step_address: (5,) int32, `AttentionPlan.step`; read by the kernels.
        chunk_table_address: (chunks,) uint64 addresses of the layer's chunks; not used where the target
            takes chunks as arguments.
        q_address, out_address: (tokens, num_heads, head_dim) float32.
        partials_address: room for `partials_bytes`.
        target: None for the device itself. Plans have to be made for the same.
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
        target: AttentionTarget | None = None,
    ) -> None:
        self._target = AttentionTarget.of(device) if target is None else target
        self._shape = shape
        self._chunks: list[int] = []
        self._by_size: dict[StepSize, tuple[BoundKernel, int]] = {}
        for size in get_args(StepSize):
            program, group_lanes = _build(device, shape, self._target, size)
            kernel = device.kernel(program, "attention", follows_pointers=not self._target.chunk_arguments)
            for i, address in enumerate((step_address, q_address, out_address, partials_address)):
                kernel.set_address(i, address)
            if not self._target.chunk_arguments:
                kernel.set_address(_FIRST_CHUNK_ARGUMENT, chunk_table_address)
            self._by_size[size] = kernel, group_lanes
        program, self._merge_lanes = _build(device, shape, self._target, "one")
        self._merge = device.kernel(program, "attention_merge")
        for i, address in enumerate((step_address, partials_address, out_address)):
            self._merge.set_address(i, address)

    def bind_chunks(self, addresses: NDArray[np.uint64]) -> None:
        """Note where the layer's chunks are, (chunks,), for kernels that do not read the table."""
        if self._target.chunk_arguments:
            self._chunks = addresses.tolist()

    def enqueue(self, plan: AttentionPlan) -> None:
        """Enqueue the step of `plan`, whose numbers are in the step buffer."""
        kernel, group_lanes = self._by_size[step_size(plan.num_tokens)]
        size = (self._shape.num_kv_heads * group_lanes, plan.num_tiles, plan.num_splits)
        for launch_chunk in plan.launches:
            if self._target.chunk_arguments:
                self._set_chunks(kernel, launch_chunk)
            kernel.enqueue(size, (group_lanes, 1, 1))
        if plan.num_splits > 1:
            lanes = self._merge_lanes
            self._merge.enqueue((self._shape.num_heads * lanes, plan.num_tokens, 1), (lanes, 1, 1))

    def _set_chunks(self, kernel: BoundKernel, launch_chunk: int) -> None:
        """Give the launch its chunks; what it has no chunk for is set to one that it does not read there."""
        chunks = self._chunks[launch_chunk : launch_chunk + LAUNCH_CHUNKS]
        chunks += chunks[:1] * (LAUNCH_CHUNKS - len(chunks))
        for i, address in enumerate(chunks, start=_FIRST_CHUNK_ARGUMENT):
            kernel.set_address(i, address)
        kernel.set_int(_FIRST_CHUNK_ARGUMENT + LAUNCH_CHUNKS, launch_chunk)


def _build(
    device: OpenClDevice, shape: AttentionShape, target: AttentionTarget, size: StepSize
) -> tuple[Program, int]:
    """Build the kernels for steps of one size; return them and the lanes of a work-group."""
    tile = target.tile_tokens(shape, size)
    source, blocks = _blocks(device, shape, target, tile, size)
    program = device.build(
        source,
        HEAD_DIM=shape.head_dim,
        NUM_KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        TILE=tile,
        CHUNK_TOKENS=CHUNK_TOKENS,
        SCALE=shape.score_scale,
        **{name.upper(): value for name, value in blocks.items()},
        **({} if shape.softcap is None else {"SOFTCAP": shape.softcap}),
        **({} if shape.window is None else {"WINDOW": shape.window}),
        **({"CHUNK_ARGUMENTS": 1} if target.chunk_arguments else {}),
    )
    return program, blocks.get("group_lanes", 1)


def _blocks(
    device: OpenClDevice, shape: AttentionShape, target: AttentionTarget, tile: int, size: StepSize
) -> tuple[str, dict[str, int]]:
    """Return the source for a device's kernel class, and its blocks by name."""
    queries = tile * shape.group
    if target.kernel_class == "gpu":
        return "attention_gpu", asdict(GpuBlocks.choose(queries, shape.head_dim, size))
    lanes = device.float_lanes
    return "attention", asdict(CpuBlocks.choose(queries, lanes)) | {"lanes": lanes}
