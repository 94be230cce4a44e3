"""Owns attention in the bench `kernels`: contexts of drawn chunks, in copies as a model's layers are."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.kernel_work import (
    EXACT_TOLERANCE,
    KernelGroup,
    Variant,
    Work,
    repeated,
    require_near,
    sweep_launches,
)
from mzd.benchmarks.plain_read import PlainRead
from mzd.device.attention import Attention, AttentionShape, AttentionTarget, partials_bytes, plan_attention
from mzd.device.numpy_reference import attend
from mzd.device.trial_memory import TrialArray, TrialMemory
from mzd.policy.units import CHUNK_TOKENS

_PATTERN_CHUNKS: Final = 13
"""Chunks drawn, and then repeated."""


def attention_group(
    memory: TrialMemory, shape: AttentionShape, num_tokens: int, context_tokens: int
) -> KernelGroup:
    """`num_tokens` queries that end a context of `context_tokens`, a multiple of 256."""
    row_bytes = shape.num_kv_heads * shape.head_dim * 4 * context_tokens
    heads = f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}"
    flops = 4 * num_tokens * shape.num_heads * shape.head_dim * context_tokens
    work = Work("attention", f"{heads} over {context_tokens}", num_tokens, row_bytes, flops)
    num_layers = sweep_launches(row_bytes, flops)
    layers = _Layers(memory, shape, num_tokens, context_tokens, num_layers)
    variant = Variant("attention", layers.enqueue, layers.check)
    return KernelGroup(work, num_layers, (variant,), PlainRead(memory, layers.chunks))


class _Layers:
    """Layers of one shape over contexts of one length.

    Attributes:
        chunks: (layers, bytes of a context) uint8.
    """

    def __init__(
        self,
        memory: TrialMemory,
        shape: AttentionShape,
        num_tokens: int,
        context_tokens: int,
        num_layers: int,
    ) -> None:
        self._memory, self._shape = memory, shape
        num_chunks = context_tokens // CHUNK_TOKENS
        chunk_values = 2 * shape.num_kv_heads * shape.head_dim * CHUNK_TOKENS
        pattern = memory.rng.standard_normal((_PATTERN_CHUNKS, chunk_values), np.float32).astype(np.float16)
        self._halves = np.resize(pattern, (num_chunks, chunk_values))
        self.chunks: TrialArray = memory.zeros((num_layers, self._halves.nbytes), np.uint8)
        repeated(self._halves.view(np.uint8).reshape(1, -1), self.chunks)
        target = AttentionTarget.of(memory.device)
        self._plan = plan_attention(shape, target, num_tokens=num_tokens, context_tokens=context_tokens)
        self._q = memory.normal(num_tokens, shape.num_heads, shape.head_dim)
        self._out = memory.zeros(self._q.values.shape)
        partials = partials_bytes(shape, target, tokens_max=num_tokens, context_tokens_max=context_tokens)
        self._addresses = {
            "step_address": memory.put(np.array(self._plan.step(), np.int32)).address,
            "q_address": self._q.address,
            "out_address": self._out.address,
            "partials_address": memory.zeros((max(partials, 4),), np.uint8).address,
        }
        self._layers = [self._layer(row) for row in self._chunk_addresses(num_layers, num_chunks)]

    def _chunk_addresses(self, num_layers: int, num_chunks: int) -> NDArray[np.uint64]:
        """(layers, chunks) uint64."""
        chunk_bytes = self._halves.strides[0]
        numbers = np.arange(num_layers * num_chunks, dtype=np.uint64).reshape(num_layers, num_chunks)
        return numbers * np.uint64(chunk_bytes) + np.uint64(self.chunks.address)

    def _layer(self, chunk_addresses: NDArray[np.uint64]) -> Attention:
        layer = Attention(
            self._memory.device,
            self._shape,
            target=AttentionTarget.of(self._memory.device),
            chunk_table_address=self._memory.put(chunk_addresses).address,
            **self._addresses,
        )
        layer.bind_chunks(chunk_addresses)
        return layer

    def enqueue(self) -> None:
        """Enqueue every layer."""
        for layer in self._layers:
            layer.enqueue(self._plan)

    def check(self) -> None:
        """Run, and compare the last layer's result. Raises as `Variant.check`."""
        self._out.values[...] = np.nan
        self._out.upload()
        self.enqueue()
        (out,) = self._memory.fetch(self._out)
        k, v = unpack_chunks(self._shape, self._halves)
        expected = attend(self._shape, self._q.values, k, v)
        require_near(f"attention, {len(out)} tokens over {len(k)}", out, expected, EXACT_TOLERANCE)


def unpack_chunks(shape: AttentionShape, chunks: NDArray[np.float16]) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of (chunks, values of a chunk), each (tokens, K/V heads, head_dim)."""
    num_chunks, heads, dim = len(chunks), shape.num_kv_heads, shape.head_dim
    k, v = chunks.reshape(num_chunks, 2, -1).transpose(1, 0, 2)
    k = k.reshape(num_chunks, heads, CHUNK_TOKENS // 32, dim, 32).transpose(0, 2, 4, 1, 3)
    v = v.reshape(num_chunks, heads, dim, CHUNK_TOKENS).transpose(0, 3, 1, 2)
    return k.reshape(-1, heads, dim), v.reshape(-1, heads, dim)
