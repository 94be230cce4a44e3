"""Owns the proof, at start, that this device computes right: each kernel of a model against NumPy.

Drivers miscompile. One that gives wrong numbers must not get as far as an answer, so every kernel runs once
in the variant that the model takes, with shapes that reach into a second chunk and a second tile. It also
fills the driver's kernel cache, which would else be the first request's wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mzd.device.attention import (
    Attention,
    AttentionPlan,
    AttentionShape,
    AttentionTarget,
    partials_bytes,
    plan_attention,
)
from mzd.device.elementwise import GatedMul, SoftCap
from mzd.device.embedding import Embedding
from mzd.device.matmul import INT8_TYPES, Activations, Matmul
from mzd.device.matmul_choice import LANES_MIN, TILES, Choice, ProductKey, product_key, token_class
from mzd.device.matmul_cpu import FusedCpuProduct
from mzd.device.matmul_gpu import gpu_limits
from mzd.device.numpy_reference import activate, attend, normalise, rotate, round_to_int8
from mzd.device.opencl import OpenClDevice
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import QkvVectors, RopeAngles, RopeKv
from mzd.device.step_buffers import attention_shape
from mzd.device.trial_memory import TrialArray, TrialMemory
from mzd.errors import MzdError
from mzd.formats.architectures import Activation
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import RopeConfig
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import StoreIndex, TensorSpec
from mzd.policy.units import CHUNK_TOKENS

EXACT_TOLERANCE = 2e-5
"""Of the largest result: the loosest that a kernel states."""

HALF_TOLERANCE = 1e-3
"""Of the largest result, for what is stored as float16."""

INT8_TOLERANCE = 2e-3
"""Of the largest result, where activations are rounded to 8 bits: a device that divides less exactly rounds
a few of them to the other side than NumPy does."""

STEP_TOKENS = (11, 8, 1)
"""Each path of the kernels that depend on it; the first is more than a tile, and a multiple of none."""

MANY_TOKENS = 37
"""Beside those, of attention on a GPU, whose blocks are others then."""

FEW_TOKENS, TILED_TOKENS, TILED_ROWS = 3, 70, 200
"""Beside those, of products on a GPU: fewer tokens than half a block; a tile and some more of any size."""

CONTEXT_TOKENS = CHUNK_TOKENS + 40
"""Of attention, with the steps at its end: reaches into a second chunk."""

SHORT_WINDOW = 35
"""Tokens of a window, for which the last token sees nothing of the first chunk, and the 8 before see some."""

ROWS, COLS = 40, 512
"""Of the matrices: row groups in an odd number, and two blocks a row of the types with the largest ones."""


def self_test(device: OpenClDevice, index: StoreIndex, *, activations: Activations) -> None:
    """Run every kernel that the model of `index` needs, and compare it with NumPy.

    Raises:
        MzdError: ``device_lost``, naming the kernel and its error, if the device computes wrongly; or as the
            driver says it.
    """
    types = {spec.type for unit in (*index.layers, index.head) for spec in unit.tensors if spec.rows > 1}
    memory = TrialMemory(device)
    try:
        _test_small_kernels(memory, index)
        for shape, rope in _attention_variants(index.config):
            _test_attention(memory, index.config, shape, rope)
        for type in sorted(types):
            _test_matmul(memory, type, activations)
            if device.kernel_class == "cpu":
                _test_fused_products(memory, type, activations, index.config.description.activation)
    finally:
        memory.free()


def _test_small_kernels(memory: TrialMemory, index: StoreIndex) -> None:
    config = index.config
    for accumulate in {False, config.description.norm_after}:
        _test_norm(memory, accumulate=accumulate)
    _test_gated_mul(memory, config.description.activation)
    if config.logit_softcap is not None:
        _test_soft_cap(memory, config.logit_softcap)
    _test_embedding(memory, index.head.tensor("token_embd"), config.embedding_scale)


def _attention_variants(config: ModelConfig) -> Iterator[tuple[AttentionShape, RopeConfig | None]]:
    """What attention and rotation the layers take; each window once more so short that it masks something."""
    for layer in dict.fromkeys(config.layers):
        shape = attention_shape(config, layer)
        rope = None if layer.rope is None else config.ropes[layer.rope]
        yield shape, rope
        if shape.window is not None:
            yield replace(shape, window=SHORT_WINDOW), rope


def _compare(
    what: str, result: NDArray[Any], expected: NDArray[Any], tolerance: float = EXACT_TOLERANCE
) -> None:
    """Raise if `result` is further from `expected` than `tolerance` times its largest value."""
    error = float(np.abs(result - expected).max() / np.abs(expected).max())
    if not error <= tolerance:  # not-a-number too
        message = f"the device computes {what} wrongly: error {error:.1e}, allowed {tolerance:.0e}"
        raise MzdError("device_lost", message, kernel=what, error=error)


def _test_norm(memory: TrialMemory, *, accumulate: bool) -> None:
    x, weight, y = memory.normal(3, COLS), memory.normal(COLS), memory.normal(3, COLS)
    expected = normalise(x.values, weight.values, 1e-5) + (y.values if accumulate else 0.0)
    spec = TensorSpec("norm", GgmlType.F32, 1, COLS, 0, weight.values.nbytes)
    norm = RmsNorm(memory.device, spec, 1e-5, x_address=x.address, y_address=y.address, accumulate=accumulate)
    norm.enqueue(weight.address, 3)
    (result,) = memory.fetch(y)
    _compare("rms_norm, accumulated" if accumulate else "rms_norm", result, expected)


def _test_gated_mul(memory: TrialMemory, activation: Activation) -> None:
    gate, up = memory.normal(1000), memory.normal(1000)
    expected = activate(gate.values, activation) * up.values
    kernel = GatedMul(memory.device, activation)
    kernel.enqueue(gate_address=gate.address, up_address=up.address, count=1000)
    (result,) = memory.fetch(gate)
    _compare(f"gated_mul, {activation}", result, expected)


def _test_soft_cap(memory: TrialMemory, cap: float) -> None:
    x = memory.put(memory.rng.normal(0.0, 2.0 * cap, 1000).astype(np.float32))
    expected = cap * np.tanh(x.values.astype(np.float64) / cap)
    SoftCap(memory.device, cap, x_address=x.address).enqueue(1000)
    (result,) = memory.fetch(x)
    _compare("soft_cap", result, expected)


def _test_embedding(memory: TrialMemory, embedding: TensorSpec, scale: float) -> None:
    """With the model's own columns, which the kernel is built for."""
    type, cols = embedding.type, embedding.cols
    spec, values, weights = memory.matrix(type, ROWS, cols)
    tokens = memory.put(np.array([0, ROWS - 1, 8, 9, 9], np.int32))
    x = memory.zeros((5, cols))
    kernel = Embedding(memory.device, spec, tokens_address=tokens.address, x_address=x.address, scale=scale)
    kernel.enqueue(weights.address, 5)
    (result,) = memory.fetch(x)
    _compare(f"embed, {type.name}", result, values[tokens.values] * scale)


def _test_matmul(memory: TrialMemory, type: GgmlType, activations: Activations) -> None:
    rows = ROWS if memory.device.kernel_class == "cpu" else TILED_ROWS
    spec, values, weights = memory.matrix(type, rows, COLS)
    rounds = activations == "int8" and type in INT8_TYPES
    tolerance = INT8_TOLERANCE if rounds else EXACT_TOLERANCE
    for what, num_tokens, choices in _matmul_trials(memory.device, spec, int8=rounds):
        x, y = memory.normal(num_tokens, COLS), memory.zeros((num_tokens, rows))
        matmul = Matmul(memory.device, spec, tokens_max=num_tokens, activations=activations, choices=choices)
        matmul.enqueue(
            weights_address=weights.address, x_address=x.address, y_address=y.address, num_tokens=num_tokens
        )
        (result,) = memory.fetch(y)
        matmul.free()
        seen = round_to_int8(x.values) if rounds else x.values.astype(np.float64)
        _compare(f"matmul, {type.name}, {what}", result, seen @ values.T, tolerance)


def _test_fused_products(
    memory: TrialMemory, type: GgmlType, activations: Activations, activation: Activation
) -> None:
    """Products of one token with what goes before them in the same launch."""
    spec, values, weights = memory.matrix(type, ROWS, COLS)
    x, other, y = memory.normal(1, COLS), memory.normal(COLS), memory.zeros((1, ROWS))
    rounds = activations == "int8" and type in INT8_TYPES
    for name, eps, product_input in (
        ("gemv_normed", 1e-5, normalise(x.values, other.values, 1e-5)),
        ("gemv_gated", None, activate(x.values, activation) * other.values),
    ):
        product = FusedCpuProduct(
            memory.device, spec, activations=activations, norm_eps=eps, activation=activation
        )
        product.enqueue(
            weights_address=weights.address,
            x_address=x.address,
            other_address=other.address,
            y_address=y.address,
        )
        (result,) = memory.fetch(y)
        seen = round_to_int8(product_input.astype(np.float32)) if rounds else product_input
        tolerance = INT8_TOLERANCE if rounds else EXACT_TOLERANCE
        _compare(f"{name}, {type.name}", result, seen @ values.T, tolerance)


def _matmul_trials(
    device: OpenClDevice, spec: TensorSpec, *, int8: bool
) -> Iterator[tuple[str, int, Mapping[ProductKey, Choice]]]:
    """What reaches every kernel for the matrix: a name, a number of tokens, the launch shape to insist on."""
    for num_tokens in STEP_TOKENS:
        yield f"{num_tokens} tokens", num_tokens, {}
    if device.kernel_class == "cpu":
        return
    yield f"{FEW_TOKENS} tokens", FEW_TOKENS, {}
    key = product_key(spec, token_class(TILED_TOKENS), int8=int8)
    yield f"blocks of {TILED_TOKENS} tokens", TILED_TOKENS, {key: Choice(LANES_MIN)}
    for tile in filter(gpu_limits(device).allows, TILES):
        yield f"tiles of {tile.rows} x {tile.tokens}", TILED_TOKENS, {key: Choice(LANES_MIN, tile)}


def _test_attention(
    memory: TrialMemory, config: ModelConfig, shape: AttentionShape, rope: RopeConfig | None
) -> None:
    """What q, k and v pass, the write of K and V, and attention, for steps at the end of a context."""
    qkv = [
        memory.rng.standard_normal((CONTEXT_TOKENS, heads, shape.head_dim), np.float32)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    ]
    vectors = _TestVectors(memory, config)
    q, k, v = vectors.apply(*qkv)
    q, k = rotate(q, rope), rotate(k, rope)
    layer = _LayerUnderTest(memory, shape, rope, vectors)
    steps = _attention_steps(memory.device)
    end = CONTEXT_TOKENS - sum(steps)
    layer.write([x[:end] for x in qkv], position=0)
    for num_tokens in steps:
        begin, end = end, end + num_tokens
        plan = layer.write([x[begin:end] for x in qkv], position=begin)
        rotated_q, result = layer.attend(plan)
        stored_k, stored_v = layer.stored(end)
        _compare("rope_kv, q", rotated_q, q[begin:end])
        _compare("rope_kv, K", stored_k, k[:end], HALF_TOLERANCE)
        _compare("rope_kv, V", stored_v, v[:end], HALF_TOLERANCE)
        expected = attend(shape, rotated_q, stored_k, stored_v)
        _compare(f"attention, {num_tokens} tokens", result, expected)


def _attention_steps(device: OpenClDevice) -> tuple[int, ...]:
    return STEP_TOKENS if device.kernel_class == "cpu" else (MANY_TOKENS, *STEP_TOKENS)


class _TestVectors:
    """Random biases and norms of q, k and v, as far as the model has them."""

    def __init__(self, memory: TrialMemory, config: ModelConfig) -> None:
        q, kv, dim = config.size("q"), config.size("kv"), config.head_dim
        self._biases = [memory.normal(n) for n in ((q, kv, kv) if config.description.qkv_bias else ())]
        self._norms = [memory.normal(n) for n in ((dim, dim) if config.description.qk_norm else ())]
        self.device_vectors = QkvVectors(
            tuple(map(self._spec, self._biases)), tuple(map(self._spec, self._norms)), config.rms_eps
        )

    @staticmethod
    def _spec(vector: TrialArray) -> TensorSpec:
        """The vector in a unit that begins at address 0."""
        size, size_bytes = vector.values.size, vector.values.nbytes
        return TensorSpec("vector", GgmlType.F32, 1, size, vector.address, size_bytes)

    def apply(self, *qkv: NDArray[Any]) -> tuple[NDArray[np.float64], ...]:
        """What q, k and v, (tokens, heads, head_dim), are before they rotate."""
        result = [x.astype(np.float64) for x in qkv]
        for i, bias in enumerate(self._biases):
            result[i] += bias.values.reshape(qkv[i].shape[1:])
        for i, weight in enumerate(self._norms):
            result[i] = normalise(result[i], weight.values, self.device_vectors.eps)
        return tuple(result)


class _LayerUnderTest:
    """The attention of one layer over two chunks that lie apart, the second one first in memory."""

    def __init__(
        self, memory: TrialMemory, shape: AttentionShape, rope: RopeConfig | None, vectors: _TestVectors
    ) -> None:
        self._memory, self._shape = memory, shape
        self._target = AttentionTarget.of(memory.device)
        self._tokens_max = max(_attention_steps(memory.device))
        row = shape.num_kv_heads * shape.head_dim * CHUNK_TOKENS
        last, _unused, first = (memory.zeros((2, row), np.float16) for _ in range(3))
        self._chunks = [first, last]
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        self._qkv = [memory.zeros((CONTEXT_TOKENS, n, shape.head_dim)) for n in heads]
        self._out = memory.zeros((self._tokens_max, shape.num_heads, shape.head_dim))
        self._step = memory.zeros((5,), np.int32)
        self._angles = None if rope is None else RopeAngles(rope)
        self._angle_values = memory.zeros((CONTEXT_TOKENS, 2, rope.dimensions // 2 if rope else 1))
        chunks = np.array([chunk.address for chunk in self._chunks], np.uint64)
        table = memory.put(chunks)
        self._rope_kv = RopeKv(
            memory.device,
            shape,
            rope,
            vectors.device_vectors,
            step_address=self._step.address,
            angles_address=self._angle_values.address,
            chunk_table_address=table.address,
        )
        self._attention = Attention(
            memory.device,
            shape,
            step_address=self._step.address,
            chunk_table_address=table.address,
            q_address=self._qkv[0].address,
            out_address=self._out.address,
            partials_address=self._partials().address,
        )
        self._rope_kv.bind_chunks(chunks)
        self._attention.bind_chunks(chunks)

    def _partials(self) -> TrialArray:
        size_bytes = partials_bytes(
            self._shape, self._target, tokens_max=self._tokens_max, context_tokens_max=CONTEXT_TOKENS
        )
        return self._memory.zeros((max(1, size_bytes // 4),))

    def write(self, qkv: list[NDArray[Any]], *, position: int) -> AttentionPlan:
        """Let the next tokens pass what stands before attention, into the chunks; return their step."""
        num_tokens = len(qkv[0])
        for array, values in zip(self._qkv, qkv, strict=True):
            array.values[:num_tokens] = values
            array.upload()
        if self._angles is not None:
            self._angles.write(self._angle_values.values[:num_tokens], position)
            self._angle_values.upload()
        plan = plan_attention(
            self._shape, self._target, num_tokens=num_tokens, context_tokens=position + num_tokens
        )
        self._step.values[...] = plan.step()
        self._step.upload()
        q, k, v = (array.address for array in self._qkv)
        self._rope_kv.enqueue(
            0, q_address=q, k_address=k, v_address=v, num_tokens=num_tokens, position=position
        )
        self._memory.device.finish()  # the host's views may change again
        return plan

    def attend(self, plan: AttentionPlan) -> tuple[NDArray[Any], NDArray[Any]]:
        """Attention of the tokens that were written last; return q as rotated, and the output."""
        self._attention.enqueue(plan)
        q, out = self._memory.fetch(self._qkv[0], self._out)
        return q[: plan.num_tokens], out[: plan.num_tokens]

    def stored(self, num_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return K and V of the first tokens as the chunks hold them, (tokens, K/V heads, head_dim)."""
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        chunks = np.array(self._memory.fetch(*self._chunks))
        k = chunks[:, 0].reshape(2, heads, CHUNK_TOKENS // 32, dim, 32).transpose(0, 2, 4, 1, 3)
        v = chunks[:, 1].reshape(2, heads, dim, CHUNK_TOKENS).transpose(0, 3, 1, 2)
        shape = (2 * CHUNK_TOKENS, heads, dim)
        return k.reshape(shape)[:num_tokens], v.reshape(shape)[:num_tokens]
