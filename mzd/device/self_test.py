"""Owns the proof, at start, that this device computes right: each kernel of a model against NumPy.

Drivers miscompile. One that gives wrong numbers must not get as far as an answer, so every kernel runs once
in the variant that the model takes, with shapes that reach into a second chunk and a second tile. It also
fills the driver's kernel cache, which would else be the first request's wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mzd.device.attention import Attention, AttentionShape, AttentionTarget, plan_attention
from mzd.device.elementwise import GatedMul, SoftCap
from mzd.device.embedding import Embedding
from mzd.device.matmul import INT8_TYPES, Activations, Matmul
from mzd.device.opencl import OpenClDevice
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import QkvVectors, RopeAngles, RopeKv
from mzd.device.scratch import ScratchBuffer
from mzd.device.step_buffers import attention_shape
from mzd.errors import MzdError
from mzd.formats.architectures import Activation
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import RopeConfig
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_layout import group_layout, unpack
from mzd.formats.weight_store import StoreIndex, TensorSpec
from mzd.policy.units import CHUNK_TOKENS

EXACT_TOLERANCE = 2e-5
"""Of the largest result: the loosest that a kernel states."""

HALF_TOLERANCE = 1e-3
"""Of the largest result, for what is stored as float16."""

INT8_TOLERANCE = 1e-2
"""Of the largest result, where activations are rounded to 8 bits (see `Matmul`)."""

STEP_TOKENS = (1, 8, 11)
"""Each path of the kernels that depend on it; the last is more than a tile, and a multiple of none."""

CONTEXT_TOKENS = CHUNK_TOKENS + 40
"""Reaches into a second chunk."""

SHORT_WINDOW = 35
"""Tokens of a window, for which the last token sees nothing of the first chunk, and the last 8 see some."""

_ROWS, _COLS = 40, 512
"""Of the matrices: row groups in an odd number, and two blocks a row of the types with the largest ones."""

_FLOATS = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})


def self_test(device: OpenClDevice, index: StoreIndex, *, activations: Activations) -> None:
    """Run every kernel that the model of `index` needs, and compare it with NumPy.

    Raises:
        MzdError: ``device_lost``, naming the kernel and its error, if the device computes wrongly.
    """
    types = {spec.type for unit in (*index.layers, index.head) for spec in unit.tensors if spec.rows > 1}
    memory = _TestMemory(device)
    try:
        _test_small_kernels(memory, index)
        for num_tokens in STEP_TOKENS:
            for shape, rope in _attention_variants(index.config):
                _test_attention(memory, index.config, shape, rope, num_tokens)
            for type in sorted(types):
                _test_matmul(memory, type, num_tokens, activations)
    finally:
        memory.free()


def _test_small_kernels(memory: _TestMemory, index: StoreIndex) -> None:
    config = index.config
    for accumulate in {False, config.description.norm_after}:
        _test_norm(memory, accumulate=accumulate)
    _test_gated_mul(memory, config.description.activation)
    if config.logit_softcap is not None:
        _test_soft_cap(memory, config.logit_softcap)
    _test_embedding(memory, index.head.tensor("token_embd").type, config.embedding_scale)


def _attention_variants(config: ModelConfig) -> Iterator[tuple[AttentionShape, RopeConfig | None]]:
    """What attention and rotation the layers take; each window once more so short that it masks something."""
    for layer in dict.fromkeys(config.layers):
        shape = attention_shape(config, layer)
        rope = None if layer.rope is None else config.ropes[layer.rope]
        yield shape, rope
        if shape.window is not None:
            yield replace(shape, window=SHORT_WINDOW), rope


class _TestMemory:
    """Shared memory for inputs and results, all freed together. The same numbers each time."""

    def __init__(self, device: OpenClDevice) -> None:
        self.device = device
        self.rng = np.random.default_rng(1)
        self._buffers: list[ScratchBuffer] = []

    def put(self, values: NDArray[Any]) -> tuple[NDArray[Any], int]:
        """Copy `values` into shared memory; return the view there and its address."""
        view, address = self.zeros(values.shape, values.dtype)
        view[...] = values
        return view, address

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> tuple[NDArray[Any], int]:
        """Return a zeroed view in shared memory and its address."""
        buffer = self.device.allocate_scratch(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._buffers.append(buffer)
        return buffer.view(dtype, shape), buffer.address

    def normal(self, *shape: int) -> tuple[NDArray[Any], int]:
        """Return normally distributed float32 in shared memory and their address."""
        return self.put(self.rng.standard_normal(shape, np.float32))

    def matrix(self, type: GgmlType) -> tuple[TensorSpec, NDArray[np.float64], int]:
        """Return a packed random matrix: its spec, its values (_ROWS, _COLS), and its address."""
        layout = group_layout(type, _COLS)
        groups = np.zeros((_ROWS // 8, layout.size_bytes), np.uint8)
        headers, scales, payload = layout.headers(groups), layout.scales(groups), layout.payload(groups)
        headers[...] = self.rng.uniform(0.01, 0.02, headers.shape).astype(np.float16).view(np.uint16)
        scales[...] = self.rng.integers(1, 64, scales.shape, np.uint8)
        if type in _FLOATS:
            payload[...] = _as_words(type, self.rng.standard_normal(payload.shape, np.float32))
        else:
            payload[...] = self.rng.integers(0, 1 << 32, payload.shape, payload.dtype)
        _, address = self.put(groups)
        spec = TensorSpec("matrix", type, _ROWS, _COLS, 0, groups.size)
        return spec, unpack(type, groups.reshape(-1), _ROWS, _COLS).astype(np.float64), address

    def free(self) -> None:
        """Wait for the queue and give all memory back."""
        self.device.finish()
        for buffer in self._buffers:
            buffer.free()


def _as_words(type: GgmlType, values: NDArray[np.float32]) -> NDArray[Any]:
    """Floats as the payload's words; bfloat16 is the upper half of a float32."""
    if type == GgmlType.F16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return bits if type == GgmlType.F32 else (bits >> 16).astype(np.uint16)


def _compare(
    what: str, result: NDArray[Any], expected: NDArray[Any], tolerance: float = EXACT_TOLERANCE
) -> None:
    """Raise if `result` is further from `expected` than `tolerance` times its largest value."""
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    if not error <= tolerance:  # not-a-number too
        message = f"the device computes {what} wrongly: error {error:.1e}, allowed {tolerance:.0e}"
        raise MzdError("device_lost", message, kernel=what, error=error)


def _test_norm(memory: _TestMemory, *, accumulate: bool) -> None:
    (x, x_address), (weight, weight_address) = memory.normal(3, _COLS), memory.normal(_COLS)
    y, y_address = memory.normal(*x.shape)
    expected = _normalise(x, weight, 1e-5) + (y if accumulate else 0.0)
    spec = TensorSpec("norm", GgmlType.F32, 1, _COLS, 0, weight.nbytes)
    RmsNorm(
        memory.device, spec, 1e-5, x_address=x_address, y_address=y_address, accumulate=accumulate
    ).enqueue(weight_address, 3)
    memory.device.finish()
    _compare("rms_norm, accumulated" if accumulate else "rms_norm", y, expected)


def _test_gated_mul(memory: _TestMemory, activation: Activation) -> None:
    (gate, gate_address), (up, up_address) = memory.normal(1000), memory.normal(1000)
    expected = _activate(gate.astype(np.float64), activation) * up
    GatedMul(memory.device, activation).enqueue(
        gate_address=gate_address, up_address=up_address, count=gate.size
    )
    memory.device.finish()
    _compare(f"gated_mul, {activation}", gate, expected)


def _test_soft_cap(memory: _TestMemory, cap: float) -> None:
    x, address = memory.put(memory.rng.normal(0.0, 2.0 * cap, 1000).astype(np.float32))
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    SoftCap(memory.device, cap, x_address=address).enqueue(x.size)
    memory.device.finish()
    _compare("soft_cap", x, expected)


def _test_embedding(memory: _TestMemory, type: GgmlType, scale: float) -> None:
    spec, values, weights_address = memory.matrix(type)
    tokens, tokens_address = memory.put(np.array([0, _ROWS - 1, 8, 9, 9], np.int32))
    x, x_address = memory.zeros((tokens.size, _COLS))
    embedding = Embedding(
        memory.device, spec, tokens_address=tokens_address, x_address=x_address, scale=scale
    )
    embedding.enqueue(weights_address, tokens.size)
    memory.device.finish()
    _compare(f"embed, {type.name}", x, values[tokens] * scale)


def _test_matmul(memory: _TestMemory, type: GgmlType, num_tokens: int, activations: Activations) -> None:
    spec, values, weights_address = memory.matrix(type)
    x, x_address = memory.normal(num_tokens, _COLS)
    y, y_address = memory.zeros((num_tokens, _ROWS))
    Matmul(memory.device, spec, tokens_max=num_tokens, activations=activations).enqueue(
        weights_address=weights_address, x_address=x_address, y_address=y_address, num_tokens=num_tokens
    )
    memory.device.finish()
    rounded = activations == "int8" and type in INT8_TYPES
    tolerance = INT8_TOLERANCE if rounded else EXACT_TOLERANCE
    _compare(f"matmul, {type.name}, {num_tokens} tokens", y, x.astype(np.float64) @ values.T, tolerance)


def _test_attention(
    memory: _TestMemory,
    config: ModelConfig,
    shape: AttentionShape,
    rope: RopeConfig | None,
    num_tokens: int,
) -> None:
    """What q, k and v pass, the write of K and V, and attention, for the last tokens of a context."""
    q, k, v = (
        memory.rng.standard_normal((CONTEXT_TOKENS, heads, shape.head_dim), np.float32)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    first = CONTEXT_TOKENS - num_tokens
    vectors = _TestVectors(memory, config)
    layer = _LayerUnderTest(memory, shape, rope, vectors)
    layer.run(q[:first], k[:first], v[:first], position=0)
    rotated_q, result = layer.run(q[first:], k[first:], v[first:], position=first)
    stored_k, stored_v = layer.stored()
    expected_q, expected_k, expected_v = vectors.apply(q, k, v)
    _compare("rope_kv, q", rotated_q, _rotate(expected_q, rope)[first:])
    _compare("rope_kv, K", stored_k, _rotate(expected_k, rope), HALF_TOLERANCE)
    _compare("rope_kv, V", stored_v, expected_v, HALF_TOLERANCE)
    _compare(f"attention, {num_tokens} tokens", result, _attend(shape, rotated_q, stored_k, stored_v))


class _TestVectors:
    """Random biases and norms of q, k and v, as far as the model has them."""

    def __init__(self, memory: _TestMemory, config: ModelConfig) -> None:
        q, kv, dim = config.size("q"), config.size("kv"), config.head_dim
        self._biases = [memory.normal(n) for n in ((q, kv, kv) if config.description.qkv_bias else ())]
        self._norms = [memory.normal(n) for n in ((dim, dim) if config.description.qk_norm else ())]
        self.device_vectors = QkvVectors(
            tuple(self._spec(*vector) for vector in self._biases),
            tuple(self._spec(*vector) for vector in self._norms),
            config.rms_eps,
        )

    @staticmethod
    def _spec(values: NDArray[Any], address: int) -> TensorSpec:
        """The vector in a unit that begins at address 0."""
        return TensorSpec("vector", GgmlType.F32, 1, values.size, address, values.nbytes)

    def apply(self, *qkv: NDArray[Any]) -> tuple[NDArray[np.float64], ...]:
        """What q, k and v, (tokens, heads, head_dim), are before they rotate."""
        result = [x.astype(np.float64) for x in qkv]
        for i, (bias, _) in enumerate(self._biases):
            result[i] += bias.reshape(qkv[i].shape[1:])
        for i, (weight, _) in enumerate(self._norms):
            result[i] = _normalise(result[i], weight, self.device_vectors.eps)
        return tuple(result)


class _LayerUnderTest:
    """The attention of one layer over two chunks that lie apart, in reverse order."""

    def __init__(
        self, memory: _TestMemory, shape: AttentionShape, rope: RopeConfig | None, vectors: _TestVectors
    ) -> None:
        self._memory, self._shape, self._rope = memory, shape, rope
        self._vectors = vectors.device_vectors
        row = shape.num_kv_heads * shape.head_dim * CHUNK_TOKENS
        self._chunks, address = memory.zeros((3, 2, row), np.float16)  # the second in memory stays unused
        self._chunk_addresses = np.array([address + 2 * self._chunks[0].nbytes, address], np.uint64)
        _, self._table_address = memory.put(self._chunk_addresses)

    def run(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, position: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Run one step of tokens at `position`; return q as rotated, and the output, shaped as q."""
        memory, device = self._memory, self._memory.device
        plan = plan_attention(
            self._shape, AttentionTarget.of(device), num_tokens=len(q), context_tokens=position + len(q)
        )
        step = np.array(plan.step(), np.int32)
        _, step_address = memory.put(step)
        rotated, q_address = memory.put(q)
        out, out_address = memory.zeros(q.shape)
        _, partials_address = memory.zeros((plan.num_splits, *q.shape[:2], 2 + q.shape[2]))
        rope = RopeKv(
            device,
            self._shape,
            self._rope,
            self._vectors,
            angles_address=self._angles_address(position, len(q)),
            step_address=step_address,
            chunk_table_address=self._table_address,
        )
        rope.bind_chunks(self._chunk_addresses)
        rope.enqueue(
            0,
            q_address=q_address,
            k_address=memory.put(k)[1],
            v_address=memory.put(v)[1],
            num_tokens=len(q),
            position=position,
        )
        attention = Attention(
            device,
            self._shape,
            q_address=q_address,
            out_address=out_address,
            partials_address=partials_address,
            step_address=step_address,
            chunk_table_address=self._table_address,
        )
        attention.bind_chunks(self._chunk_addresses)
        attention.enqueue(plan)
        device.finish()
        return rotated, out

    def _angles_address(self, position: int, num_tokens: int) -> int:
        """Angles of the step's tokens; of a layer that does not rotate, any address."""
        if self._rope is None:
            return self._table_address
        angles, address = self._memory.zeros((num_tokens, 2, self._rope.dimensions // 2))
        RopeAngles(self._rope).write(angles, position)
        return address

    def stored(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return K and V as the chunks hold them, (tokens, K/V heads, head_dim) float16."""
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        chunks = self._chunks[[2, 0]]
        k = chunks[:, 0].reshape(2, heads, CHUNK_TOKENS // 32, dim, 32).transpose(0, 2, 4, 1, 3)
        v = chunks[:, 1].reshape(2, heads, dim, CHUNK_TOKENS).transpose(0, 3, 1, 2)
        shape = (2 * CHUNK_TOKENS, heads, dim)
        return k.reshape(shape)[:CONTEXT_TOKENS], v.reshape(shape)[:CONTEXT_TOKENS]


def _activate(z: NDArray[np.float64], activation: Activation) -> NDArray[np.float64]:
    if activation == "silu":
        return z / (1.0 + np.exp(-z))
    gelu: NDArray[np.float64] = 0.5 * z * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (z + 0.044715 * z**3)))
    return gelu


def _normalise(x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[np.float64]:
    """RMS norm of the last axis."""
    mean_square = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = x / np.sqrt(mean_square + eps) * weight
    return normalised


def _rotate(x: NDArray[Any], rope: RopeConfig | None) -> NDArray[np.float64]:
    """Rotate (tokens, heads, head_dim) from position 0 on."""
    if rope is None:
        return x.astype(np.float64)
    pairs = rope.dimensions // 2
    angles = np.zeros((len(x), 2, pairs), np.float32)
    RopeAngles(rope).write(angles, 0)
    turn = (angles[:, 0] + 1j * angles[:, 1])[:, None]
    stride, second = (2, 1) if rope.style == "pairs" else (1, pairs)
    a = slice(0, stride * pairs, stride)
    b = slice(second, second + stride * pairs, stride)
    y = x.astype(np.float64)
    z = (y[..., a] + 1j * y[..., b]) * turn
    y[..., a], y[..., b] = z.real, z.imag
    return y


def _attend(shape: AttentionShape, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.float64]:
    """Causal attention of a context's last tokens; q (queries, heads, dim), k and v (tokens, heads, dim)."""
    keys, values = (np.repeat(x.astype(np.float64), shape.group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,thd->hqt", q.astype(np.float64), keys) * shape.score_scale
    if shape.softcap is not None:
        scores = shape.softcap * np.tanh(scores / shape.softcap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    seen = (distance >= 0) & (distance < (len(k) if shape.window is None else shape.window))
    weights = np.where(seen, np.exp(scores - scores.max(axis=2, keepdims=True)), 0.0)
    weights /= weights.sum(axis=2, keepdims=True)
    attended: NDArray[np.float64] = np.einsum("hqt,thd->qhd", weights, values)
    return attended
