"""Owns what Q, K and V pass before attention: the angles of RoPE, and the launch that also stores K and V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mzd.device.attention import AttentionShape, AttentionTarget
from mzd.device.opencl import Define, OpenClDevice, Program
from mzd.formats.layer_config import RopeConfig
from mzd.formats.weight_store import TensorSpec
from mzd.policy.units import CHUNK_TOKENS

_GPU_GROUP_LANES = 64
"""Work-items for a head of a token on a GPU: a pair of channels each, for the most usual heads."""

_CHUNKS_ARGUMENT, _BIAS_ARGUMENT, _NORM_ARGUMENT, _FIRST_TOKEN_ARGUMENT = 5, 6, 9, 11
"""Of rope_kv: the table or the chunk; three biases; two norms; an integer."""


_POSITIONS_AHEAD = 64
"""Positions whose angles are computed at once for single tokens: 16 KiB at 64 rotating channels."""


class RopeAngles:
    """Cosines and sines for consecutive positions, computed in double precision.

    On the host because a device's float32 sine of a large angle may be anything, and because the few
    numbers of a step serve every head of every layer. Single tokens follow each other: theirs are computed
    for some positions at once.
    """

    def __init__(self, rope: RopeConfig) -> None:
        exponents = np.arange(0, rope.dimensions, 2, dtype=np.float64) / rope.dimensions
        divisors = 1.0 if rope.freq_factors is None else np.array(rope.freq_factors, np.float64)
        self._frequencies: NDArray[np.float64] = rope.base**-exponents / divisors
        self._ahead = np.empty((_POSITIONS_AHEAD, 2, self.num_pairs), np.float32)
        self._ahead_position = -_POSITIONS_AHEAD

    @property
    def num_pairs(self) -> int:
        """Pairs of channels that rotate, half of the rotating dimensions."""
        return len(self._frequencies)

    def write(self, out: NDArray[np.float32], position: int) -> None:
        """Fill `out`, (tokens, 2, num_pairs) float32, for `position` and on: cosines, then sines."""
        if len(out) > 1:
            self._compute(out, position)
            return
        if not 0 <= position - self._ahead_position < _POSITIONS_AHEAD:
            self._compute(self._ahead, position)
            self._ahead_position = position
        out[0] = self._ahead[position - self._ahead_position]

    def _compute(self, out: NDArray[np.float32], position: int) -> None:
        positions = np.arange(position, position + len(out), dtype=np.float64)
        angles = positions[:, None] * self._frequencies
        np.cos(angles, out=out[:, 0], casting="same_kind")
        np.sin(angles, out=out[:, 1], casting="same_kind")


@dataclass(frozen=True, slots=True)
class QkvVectors:
    """Small vectors of a layer that q, k and v meet, in its weight unit; float32.

    Attributes:
        biases: of q, k and v, or none.
        norms: of each head of q, and of k, (head_dim,) each, or none.
        eps: of the norms.
    """

    biases: tuple[TensorSpec, ...] = ()
    norms: tuple[TensorSpec, ...] = ()
    eps: float = 0.0

    @property
    def defines(self) -> dict[str, Define]:
        """What the kernel is built with for them."""
        bias: dict[str, Define] = {"QKV_BIAS": 1} if self.biases else {}
        return bias | ({"QK_NORM_EPS": self.eps} if self.norms else {})


class RopeKv:
    """Adds biases, normalises and rotates q and k; writes k and v of a step into a layer's chunks.

    Args:
        rope: None if the layer does not rotate.
        vectors: which of the first two the layer does.
        step_address: int32, the position first.
        angles_address: (tokens, 2, pairs) float32, as `RopeAngles.write` leaves them.
        chunk_table_address: (chunks,) uint64 addresses of the layer's chunks; not used where the target
            takes chunks as arguments.
        target: None for the device itself.
    """

    def __init__(
        self,
        device: OpenClDevice,
        shape: AttentionShape,
        rope: RopeConfig | None,
        vectors: QkvVectors,
        *,
        step_address: int,
        angles_address: int,
        chunk_table_address: int,
        target: AttentionTarget | None = None,
    ) -> None:
        target = AttentionTarget.of(device) if target is None else target
        self._chunk_arguments = target.chunk_arguments
        self._chunks: list[int] = []
        self._group_lanes, self._groups_a_token = 1, 1
        if target.kernel_class == "gpu":
            self._group_lanes = _GPU_GROUP_LANES
            self._groups_a_token = shape.num_heads + 2 * shape.num_kv_heads
        program = _build(device, shape, rope, vectors, target)
        self._kernel = device.kernel(program, "rope_kv", follows_pointers=not self._chunk_arguments)
        self._kernel.set_address(0, step_address)
        self._kernel.set_address(1, angles_address)
        self._kernel.set_int(_FIRST_TOKEN_ARGUMENT, 0)
        if not self._chunk_arguments:
            self._kernel.set_address(_CHUNKS_ARGUMENT, chunk_table_address)
        for argument in range(_BIAS_ARGUMENT, _FIRST_TOKEN_ARGUMENT):
            self._kernel.set_address(argument, step_address)  # where the layer has no such vector
        offsets = [
            *enumerate((spec.offset_bytes for spec in vectors.biases), start=_BIAS_ARGUMENT),
            *enumerate((spec.offset_bytes for spec in vectors.norms), start=_NORM_ARGUMENT),
        ]
        self._vector_offsets = dict(offsets)

    def bind_chunks(self, addresses: NDArray[np.uint64]) -> None:
        """Note where the layer's chunks are, (chunks,), for kernels that do not read the table."""
        if self._chunk_arguments:
            self._chunks = addresses.tolist()

    def enqueue(
        self,
        weights_address: int,
        *,
        q_address: int,
        k_address: int,
        v_address: int,
        num_tokens: int,
        position: int,
    ) -> None:
        """Enqueue for q (tokens, heads, head_dim) and k, v (tokens, K/V heads, head_dim), float32.

        Args:
            weights_address: of the unit that holds the layer's vectors.
            position: of the first token, as in the step buffer.
        """
        for argument, offset_bytes in self._vector_offsets.items():
            self._kernel.set_address(argument, weights_address + offset_bytes)
        self._kernel.set_address(2, q_address)
        self._kernel.set_address(3, k_address)
        self._kernel.set_address(4, v_address)
        if not self._chunk_arguments:
            self._enqueue(num_tokens)
            return
        for first, end in _tokens_by_chunk(position, num_tokens):
            self._kernel.set_address(_CHUNKS_ARGUMENT, self._chunks[(position + first) // CHUNK_TOKENS])
            self._kernel.set_int(_FIRST_TOKEN_ARGUMENT, first)
            self._enqueue(end - first)

    def _enqueue(self, num_tokens: int) -> None:
        size = (self._groups_a_token * self._group_lanes, num_tokens)
        self._kernel.enqueue(size, (self._group_lanes, 1))


def _tokens_by_chunk(position: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut a step at the borders of chunks: (first token, end) of each piece."""
    first = 0
    while first < num_tokens:
        end = min(num_tokens, first + CHUNK_TOKENS - (position + first) % CHUNK_TOKENS)
        yield first, end
        first = end


def _build(
    device: OpenClDevice,
    shape: AttentionShape,
    rope: RopeConfig | None,
    vectors: QkvVectors,
    target: AttentionTarget,
) -> Program:
    is_gpu = target.kernel_class == "gpu"
    return device.build(
        "rope_gpu" if is_gpu else "rope",
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        ROPE_DIMS=0 if rope is None else rope.dimensions,
        ROPE_HALVES=rope is not None and rope.style == "halves",
        CHUNK_TOKENS=CHUNK_TOKENS,
        **vectors.defines,
        **({"CHUNK_ARGUMENTS": 1} if target.chunk_arguments else {}),
        **({"GROUP_LANES": _GPU_GROUP_LANES} if is_gpu else {}),
    )
