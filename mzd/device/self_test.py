"""Owns the proof, at start, that this device computes right: each kernel of a model against NumPy.

Drivers miscompile. One that gives wrong numbers must not get as far as an answer, so every kernel runs once
in the variant that the model takes, with shapes that reach into a second chunk and a second tile. It also
fills the driver's kernel cache, which would else be the first request's wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mzd.device.attention import Attention, AttentionShape, plan_attention
from mzd.device.elementwise import SiluMul
from mzd.device.embedding import Embedding
from mzd.device.matmul import INT8_TYPES, Activations, Matmul
from mzd.device.opencl import OpenClDevice
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import RopeAngles, RopeKv
from mzd.device.step_buffers import attention_shape
from mzd.device.svm import ScratchBuffer
from mzd.errors import MzdError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.model_config import RopeConfig
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

_ROWS, _COLS = 40, 96
"""Of the matrices: row groups in an odd number, three blocks a row."""


def self_test(device: OpenClDevice, index: StoreIndex, *, activations: Activations) -> None:
    """Run every kernel that the model of `index` needs, and compare it with NumPy.

    Raises:
        MzdError: ``device_lost``, naming the kernel and its error, if the device computes wrongly.
    """
    types = {spec.type for unit in (*index.layers, index.head) for spec in unit.tensors if spec.rows > 1}
    memory = _TestMemory(device)
    try:
        _test_norm(memory)
        _test_silu_mul(memory)
        _test_embedding(memory, index.head.tensor("token_embd").type)
        for num_tokens in STEP_TOKENS:
            _test_attention(memory, attention_shape(index.config), index.config.rope, num_tokens)
            for type in sorted(types):
                _test_matmul(memory, type, num_tokens, activations)
    finally:
        memory.free()


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
        headers, payload = layout.headers(groups), layout.payload(groups)
        headers[...] = self.rng.uniform(0.01, 0.02, headers.shape).astype(np.float16).view(np.uint16)
        if type in (GgmlType.F32, GgmlType.F16):
            value_type = np.float32 if type == GgmlType.F32 else np.float16
            payload[...] = self.rng.standard_normal(payload.shape).astype(value_type).view(payload.dtype)
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


def _compare(
    what: str, result: NDArray[Any], expected: NDArray[Any], tolerance: float = EXACT_TOLERANCE
) -> None:
    """Raise if `result` is further from `expected` than `tolerance` times its largest value."""
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    if not error <= tolerance:  # not-a-number too
        message = f"the device computes {what} wrongly: error {error:.1e}, allowed {tolerance:.0e}"
        raise MzdError("device_lost", message, kernel=what, error=error)


def _test_norm(memory: _TestMemory) -> None:
    (x, x_address), (weight, weight_address) = memory.normal(3, _COLS), memory.normal(_COLS)
    y, y_address = memory.zeros(x.shape)
    spec = TensorSpec("norm", GgmlType.F32, 1, _COLS, 0, weight.nbytes)
    RmsNorm(memory.device, spec, 1e-5, x_address=x_address, y_address=y_address).enqueue(weight_address, 3)
    memory.device.finish()
    mean_square = (x.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
    _compare("rms_norm", y, x / np.sqrt(mean_square + 1e-5) * weight)


def _test_silu_mul(memory: _TestMemory) -> None:
    (gate, gate_address), (up, up_address) = memory.normal(1000), memory.normal(1000)
    expected = gate / (1.0 + np.exp(-gate.astype(np.float64))) * up
    SiluMul(memory.device).enqueue(gate_address=gate_address, up_address=up_address, count=gate.size)
    memory.device.finish()
    _compare("silu_mul", gate, expected)


def _test_embedding(memory: _TestMemory, type: GgmlType) -> None:
    spec, values, weights_address = memory.matrix(type)
    tokens, tokens_address = memory.put(np.array([0, _ROWS - 1, 8, 9, 9], np.int32))
    x, x_address = memory.zeros((tokens.size, _COLS))
    embedding = Embedding(memory.device, spec, tokens_address=tokens_address, x_address=x_address)
    embedding.enqueue(weights_address, tokens.size)
    memory.device.finish()
    _compare(f"embed, {type.name}", x, values[tokens])


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


def _test_attention(memory: _TestMemory, shape: AttentionShape, rope: RopeConfig, num_tokens: int) -> None:
    """RoPE, the write of K and V, and attention over them, for the last tokens of a context."""
    q, k, v = (
        memory.rng.standard_normal((CONTEXT_TOKENS, heads, shape.head_dim), np.float32)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    first = CONTEXT_TOKENS - num_tokens
    layer = _LayerUnderTest(memory, shape, rope)
    layer.run(q[:first], k[:first], v[:first], position=0)
    rotated_q, result = layer.run(q[first:], k[first:], v[first:], position=first)
    stored_k, stored_v = layer.stored()
    _compare("rope_kv, q", rotated_q, _rotate(q, rope)[first:])
    _compare("rope_kv, K", stored_k, _rotate(k, rope), HALF_TOLERANCE)
    _compare("rope_kv, V", stored_v, v, HALF_TOLERANCE)
    _compare(f"attention, {num_tokens} tokens", result, _attend(rotated_q, stored_k, stored_v))


class _LayerUnderTest:
    """The attention of one layer over two chunks that lie apart, in reverse order."""

    def __init__(self, memory: _TestMemory, shape: AttentionShape, rope: RopeConfig) -> None:
        self._memory, self._shape, self._rope = memory, shape, rope
        row = shape.num_kv_heads * shape.head_dim * CHUNK_TOKENS
        self._chunks, address = memory.zeros((3, 2, row), np.float16)  # the second in memory stays unused
        addresses = [address + 2 * self._chunks[0].nbytes, address]
        _, self._table_address = memory.put(np.array(addresses, np.uint64))

    def run(
        self, q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, position: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Run one step of tokens at `position`; return q as rotated, and the output, shaped as q."""
        memory, device = self._memory, self._memory.device
        plan = plan_attention(
            self._shape,
            num_tokens=len(q),
            context_tokens=position + len(q),
            compute_units=device.compute_units,
        )
        step = np.array([position, len(q), plan.num_splits, plan.split_chunks], np.int32)
        addresses = {"step_address": memory.put(step)[1], "chunk_table_address": self._table_address}
        angles, angles_address = memory.zeros((len(q), 2, self._rope.dimensions // 2))
        RopeAngles(self._rope).write(angles, position)
        rotated, q_address = memory.put(q)
        out, out_address = memory.zeros(q.shape)
        _, partials_address = memory.zeros((plan.num_splits, *q.shape[:2], 2 + q.shape[2]))
        RopeKv(device, self._shape, self._rope, angles_address=angles_address, **addresses).enqueue(
            q_address=q_address, k_address=memory.put(k)[1], v_address=memory.put(v)[1], num_tokens=len(q)
        )
        Attention(
            device,
            self._shape,
            q_address=q_address,
            out_address=out_address,
            partials_address=partials_address,
            **addresses,
        ).enqueue(plan)
        device.finish()
        return rotated, out

    def stored(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return K and V as the chunks hold them, (tokens, K/V heads, head_dim) float16."""
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        chunks = self._chunks[[2, 0]]
        k = chunks[:, 0].reshape(2, heads, CHUNK_TOKENS // 32, dim, 32).transpose(0, 2, 4, 1, 3)
        v = chunks[:, 1].reshape(2, heads, dim, CHUNK_TOKENS).transpose(0, 3, 1, 2)
        shape = (2 * CHUNK_TOKENS, heads, dim)
        return k.reshape(shape)[:CONTEXT_TOKENS], v.reshape(shape)[:CONTEXT_TOKENS]


def _rotate(x: NDArray[Any], rope: RopeConfig) -> NDArray[np.float64]:
    """Rotate (tokens, heads, head_dim) from position 0 on."""
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


def _attend(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[np.float64]:
    """Causal attention of a context's last tokens; q (queries, heads, dim), k and v (tokens, heads, dim)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,thd->hqt", q.astype(np.float64), keys) / np.sqrt(q.shape[2])
    seen = np.arange(len(k)) <= np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.where(seen, np.exp(scores - scores.max(axis=2, keepdims=True)), 0.0)
    weights /= weights.sum(axis=2, keepdims=True)
    attended: NDArray[np.float64] = np.einsum("hqt,thd->qhd", weights, values)
    return attended
