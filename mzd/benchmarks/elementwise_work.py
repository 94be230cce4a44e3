"""Owns the small kernels in the bench `kernels`: norm, RoPE with the write of K and V, gate, embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.attention_work import unpack_chunks
from mzd.benchmarks.kernel_work import (
    EXACT_TOLERANCE,
    HALF_TOLERANCE,
    KernelGroup,
    Variant,
    Work,
    require_near,
)
from mzd.benchmarks.plain_read import LINE_BYTES, PlainRead
from mzd.device.attention import AttentionShape
from mzd.device.elementwise import GatedMul
from mzd.device.embedding import Embedding
from mzd.device.numpy_reference import activate, normalise, rotate
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import QkvVectors, RopeAngles, RopeKv
from mzd.device.trial_memory import TrialArray, TrialMemory
from mzd.formats.architectures import Activation
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import RopeConfig
from mzd.formats.weight_store import TensorSpec
from mzd.policy.units import CHUNK_TOKENS

NUM_LAUNCHES: Final = 32
"""Of one measurement. They work on the same activations, which lie in a cache, as they do in a step."""

_EPS: Final = 1e-6
_EMBEDDING_ROWS: Final = 4096


def norm_group(memory: TrialMemory, num_tokens: int, hidden_size: int) -> KernelGroup:
    """RMS norm of `num_tokens` rows."""
    x, weight = memory.normal(num_tokens, hidden_size), memory.normal(hidden_size)
    y = memory.zeros(x.values.shape)
    spec = TensorSpec("norm", GgmlType.F32, 1, hidden_size, 0, weight.values.nbytes)
    norm = RmsNorm(memory.device, spec, _EPS, x_address=x.address, y_address=y.address)

    def launch() -> None:
        norm.enqueue(weight.address, num_tokens)

    def compare() -> None:
        launch()
        (result,) = memory.fetch(y)
        require_near("rms_norm", result, normalise(x.values, weight.values, _EPS), EXACT_TOLERANCE)

    size_bytes = 2 * x.values.nbytes + weight.values.nbytes
    work = Work("rms_norm", f"{hidden_size}", num_tokens, size_bytes, 4 * x.values.size)
    return _group(memory, work, launch, compare)


def gate_group(memory: TrialMemory, num_tokens: int, ffn_size: int, activation: Activation) -> KernelGroup:
    """activation(gate) * up for `num_tokens` rows."""
    # Up to 1, so that the gate, which each launch replaces, does not grow out of range.
    up = memory.put(memory.rng.uniform(-1, 1, (num_tokens, ffn_size)).astype(np.float32))
    gate = memory.normal(num_tokens, ffn_size)
    expected = activate(gate.values, activation) * up.values
    gated = GatedMul(memory.device, activation)

    def launch() -> None:
        gated.enqueue(gate_address=gate.address, up_address=up.address, count=gate.values.size)

    def compare() -> None:
        launch()
        (result,) = memory.fetch(gate)
        require_near("gated_mul", result, expected, EXACT_TOLERANCE)

    # The activation counts as four operations.
    work = Work("gated_mul", f"{ffn_size}", num_tokens, 3 * gate.values.nbytes, 5 * gate.values.size)
    return _group(memory, work, launch, compare)


def embedding_group(memory: TrialMemory, num_tokens: int, hidden_size: int, type: GgmlType) -> KernelGroup:
    """Embedding rows of `num_tokens` tokens of a small vocabulary."""
    spec, values, weights = memory.matrix(type, _EMBEDDING_ROWS, hidden_size)
    tokens = memory.put(memory.rng.integers(0, _EMBEDDING_ROWS, num_tokens, np.int32))
    x = memory.zeros((num_tokens, hidden_size))
    embedding = Embedding(memory.device, spec, tokens_address=tokens.address, x_address=x.address)

    def launch() -> None:
        embedding.enqueue(weights.address, num_tokens)

    def compare() -> None:
        launch()
        (result,) = memory.fetch(x)
        require_near("embed", result, values[tokens.values], EXACT_TOLERANCE)

    size_bytes = x.values.nbytes + num_tokens * type.row_bytes(hidden_size)
    work = Work(f"embed {type.name.lower()}", f"{hidden_size}", num_tokens, size_bytes, x.values.size)
    return _group(memory, work, launch, compare)


def rope_group(
    memory: TrialMemory, num_tokens: int, shape: AttentionShape, rope: RopeConfig, *, qk_norm: bool
) -> KernelGroup:
    """Rotation of q and k, with their norms where the model has some, and the write of K and V."""
    step = _RopeStep(memory, num_tokens, shape, rope, qk_norm=qk_norm)
    kv_values = num_tokens * shape.num_kv_heads * shape.head_dim
    q_values = num_tokens * shape.num_heads * shape.head_dim
    size_bytes = 8 * q_values + 2 * kv_values * (4 + 2)  # q back and forth; k and v from float to half
    flops = (3 + 4 * qk_norm) * (q_values + kv_values)
    heads = f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}"
    work = Work("rope_kv", heads, num_tokens, size_bytes, flops)
    return _group(memory, work, step.launch, step.compare)


class _RopeStep:
    """A step at the beginning of a context, with what `RopeKv` reads and writes of it."""

    def __init__(
        self,
        memory: TrialMemory,
        num_tokens: int,
        shape: AttentionShape,
        rope: RopeConfig,
        *,
        qk_norm: bool,
    ) -> None:
        self._memory, self._shape, self._rope = memory, shape, rope
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._qkv = [memory.normal(num_tokens, n, shape.head_dim) for n in heads]
        self._drawn = [array.values.copy() for array in self._qkv]
        self._norms = [memory.normal(shape.head_dim) for _ in range(2 * qk_norm)]
        num_chunks = -(-num_tokens // CHUNK_TOKENS)
        chunk_values = 2 * shape.num_kv_heads * shape.head_dim * CHUNK_TOKENS
        self._chunks = memory.zeros((num_chunks, chunk_values), np.float16)
        addresses = np.arange(num_chunks, dtype=np.uint64) * np.uint64(2 * chunk_values)
        addresses += np.uint64(self._chunks.address)
        self._kernel = RopeKv(
            memory.device,
            shape,
            rope,
            QkvVectors(norms=tuple(map(_vector_spec, self._norms)), eps=_EPS),
            step_address=memory.put(np.array([0, num_tokens, 1, num_chunks, 0], np.int32)).address,
            angles_address=self._angles(num_tokens).address,
            chunk_table_address=memory.put(addresses).address,
        )
        self._kernel.bind_chunks(addresses)

    def _angles(self, num_tokens: int) -> TrialArray:
        angles = self._memory.zeros((num_tokens, 2, self._rope.dimensions // 2))
        RopeAngles(self._rope).write(angles.values, 0)
        angles.upload()
        return angles

    def launch(self) -> None:
        """Enqueue the step; q rotates on each time."""
        q, k, v = (array.address for array in self._qkv)
        num_tokens = len(self._drawn[0])
        self._kernel.enqueue(0, q_address=q, k_address=k, v_address=v, num_tokens=num_tokens, position=0)

    def compare(self) -> None:
        """Run, and compare q and the chunks. Raises as `Variant.check`."""
        self.launch()
        q, chunks = self._memory.fetch(self._qkv[0], self._chunks)
        k, v = (x[: len(q)] for x in unpack_chunks(self._shape, chunks))
        drawn_q, drawn_k, drawn_v = self._drawn
        expected_q, expected_k = (
            rotate(self._normalised(x, i), self._rope) for i, x in enumerate((drawn_q, drawn_k))
        )
        require_near("rope_kv, q", q, expected_q, EXACT_TOLERANCE)
        require_near("rope_kv, K", k, expected_k, HALF_TOLERANCE)
        require_near("rope_kv, V", v, drawn_v, HALF_TOLERANCE)

    def _normalised(self, x: NDArray[Any], number: int) -> NDArray[Any]:
        return normalise(x, self._norms[number].values, _EPS) if self._norms else x


def _vector_spec(array: TrialArray) -> TensorSpec:
    """A vector in a unit that begins at address 0."""
    return TensorSpec("vector", GgmlType.F32, 1, array.values.size, array.address, array.values.nbytes)


def _group(
    memory: TrialMemory, work: Work, launch: Callable[[], None], compare: Callable[[], None]
) -> KernelGroup:
    """One kernel, and the read of as many bytes."""

    def enqueue() -> None:
        for _ in range(NUM_LAUNCHES):
            launch()

    line_bytes = -(-work.size_bytes // LINE_BYTES) * LINE_BYTES
    source = memory.put(memory.rng.integers(0, 256, (1, line_bytes), np.uint8))
    read = PlainRead(memory, source, num_launches=NUM_LAUNCHES)
    return KernelGroup(work, NUM_LAUNCHES, (Variant(work.kernel, enqueue, compare),), read)
