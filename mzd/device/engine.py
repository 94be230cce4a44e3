"""Owns a model on the device: which units are bound, and the one step that may run over them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from mzd.device.attention import AttentionPlan, AttentionTarget, plan_attention
from mzd.device.head_graph import HeadGraph
from mzd.device.layer_graph import LayerGraph
from mzd.device.matmul import Activations
from mzd.device.opencl import OpenClDevice
from mzd.device.product_plan import Choices, ProductPlan
from mzd.device.replay import Replay
from mzd.device.rope import RopeAngles
from mzd.device.step_buffers import StepBuffers, StepLimits, attention_shape, attention_shapes
from mzd.errors import MzdError
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import StoreIndex
from mzd.policy.units import CHUNK_TOKENS

LogitRows = Literal["last", "all"]

_CHANNELS_MULTIPLE = 8
"""Kernels take channels of a head eight at a time."""


class Engine:
    """Computes steps: `begin`, then every layer in order (one by one as they become resident, or all at
    once), then perhaps the head, then `mark` and `wait`.

    Nothing between `begin` and `wait` blocks. Only one step runs at a time, because its numbers (position,
    tokens, tables) lie in memory that its kernels read.

    A unit is used only while bound. The caller binds what is resident, and unbinds before it goes.

    Args:
        context_tokens_max: the longest context.
        ubatch_tokens_max: the most tokens of one step.
        logit_rows_max: the most rows of logits of one step.
        activations: ``f32`` is exact, ``int8`` rounds them where a matrix is quantised (see `Matmul`), but
            for q, k, v and the head.
        choices: launch shapes of products that were measured; see `measured_choices`.

    Attributes:
        num_layers: layers of the model.
        scratch_bytes: all memory that the engine holds on the device.

    Raises:
        MzdError: ``unsupported_architecture`` for head sizes that the kernels cannot take;
            ``insufficient_memory``.
    """

    def __init__(
        self,
        device: OpenClDevice,
        index: StoreIndex,
        *,
        context_tokens_max: int,
        ubatch_tokens_max: int = 512,
        logit_rows_max: int = 8,
        activations: Activations = "f32",
        choices: Choices | None = None,
    ) -> None:
        _check_head_size(index.config)
        self._device = device
        self._config = index.config
        self._limits = StepLimits(ubatch_tokens_max, context_tokens_max, logit_rows_max)
        self._buffers = StepBuffers(device, index.config, self._limits)
        products = ProductPlan(activations, choices, self._buffers.rounded_address)
        self._angles = [RopeAngles(rope) for rope in index.config.ropes]
        self._shapes = attention_shapes(index.config)
        self._target = AttentionTarget.of(device)
        self._layers = [
            LayerGraph(device, index.config, extent, layer, self._buffers, products)
            for layer, extent in enumerate(index.layers)
        ]
        self._shape_numbers = [
            self._shapes.index(attention_shape(index.config, layer)) for layer in index.config.layers
        ]
        self._row = Replay(device.kernel_queue)
        self._head = HeadGraph(device, index.config, index.head, self._buffers, products)
        self._num_chunks = [0] * len(self._layers)
        self._plans: list[AttentionPlan] = []  # one for each shape while a step runs, else none
        self._next_layer = 0
        self._context_tokens = 0
        self._num_logit_rows = 0
        self._stale_tables: set[int] = set()  # layers whose table the device has not got yet
        self._last_mark: cl.Event | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that the engine holds on the device, beside the units."""
        return self._buffers.size_bytes

    def bind_layer(self, layer: int, weights_address: int, chunk_addresses: NDArray[np.uint64]) -> None:
        """Bind a layer's resident weights and chunks; called again when chunks are added.

        Args:
            weights_address: of the weight unit.
            chunk_addresses: (chunks,) uint64, the context's chunks in order.

        Raises:
            ValueError: more chunks than the longest context has.
            RuntimeError: the running step has already enqueued the layer.
        """
        if self._plans and layer < self._next_layer:
            raise RuntimeError(f"layer {layer} bound again while a step uses it")
        if len(chunk_addresses) > self._limits.chunks:
            raise ValueError(f"{len(chunk_addresses)} chunks, at most {self._limits.chunks}")
        self._row.forget()
        self._layers[layer].bind(weights_address, chunk_addresses)
        self._num_chunks[layer] = len(chunk_addresses)
        self._buffers.chunk_tables[layer, : len(chunk_addresses)] = chunk_addresses
        self._stale_tables.add(layer)

    def bind_head(self, address: int) -> None:
        """Bind the resident head unit."""
        self._head.bind(address)

    def unbind_all(self) -> None:
        """Forget every unit.

        Raises:
            RuntimeError: a step is running.
        """
        self._check_idle()
        self._row.forget()
        for layer in self._layers:
            layer.unbind()
        self._head.unbind()
        self._num_chunks = [0] * len(self._layers)
        self._buffers.chunk_tables[:] = 0

    def begin(
        self, tokens: NDArray[np.int32], position: int, embeddings: NDArray[np.float32] | None = None
    ) -> None:
        """Begin a step of `tokens` at `position` of the context.

        Args:
            tokens: (n,) int32, 1 <= n <= ubatch_tokens_max.
            position: tokens of the context before these; their K and V are in the chunks.
            embeddings: (n, hidden) float32, the matrix's rows of the tokens; None takes them from the bound
                head.

        Raises:
            ValueError: too many tokens, none, an id outside the vocabulary, or past the context's end.
            RuntimeError: a step is running, or the head is neither given nor bound.
        """
        self._check_idle()
        self._check_step(tokens, position)
        num_tokens = len(tokens)
        plans = self._write_plans(num_tokens, position)
        for angles, out in zip(self._angles, self._buffers.angles, strict=True):
            angles.write(out[:num_tokens], position)
        self._buffers.tokens[:num_tokens] = tokens
        if embeddings is not None:
            np.multiply(embeddings, self._config.embedding_scale, out=self._buffers.x[:num_tokens])
        self._buffers.upload_step(num_tokens, with_x=embeddings is not None)
        if embeddings is None:
            self._head.enqueue_embedding(num_tokens)
        self._plans = plans
        self._next_layer = 0
        self._context_tokens = position + num_tokens
        self._num_logit_rows = 0

    def enqueue_layer(self, layer: int) -> None:
        """Enqueue the next layer of the running step; its K and V go into the bound chunks.

        Raises:
            RuntimeError: no step is running, it is not that layer's turn, or the layer's weights or the
                chunks for the step's tokens are not bound.
        """
        if not self._plans or layer != self._next_layer:
            raise RuntimeError(f"layer {layer} enqueued, expected {self._next_layer} of a running step")
        self._prepare_layer(layer)
        self._layers[layer].enqueue(self._plans[self._shape_numbers[layer]])
        self._next_layer += 1

    def enqueue_layers(self) -> None:
        """Enqueue every layer of the step that has just begun, as `enqueue_layer` does.

        A step like the one before costs the host a tenth of what single layers do.

        Raises:
            RuntimeError: no step has begun, it has layers already, or a layer's weights or chunks are not
                bound.
        """
        if not self._plans or self._next_layer:
            raise RuntimeError(f"layers enqueued at once, {self._next_layer} of them again or without a step")
        for layer in range(len(self._layers)):
            self._prepare_layer(layer)
        self._row.run(self._row_key(), self._enqueue_each_layer)
        self._next_layer = len(self._layers)

    def enqueue_head(self, rows: LogitRows) -> None:
        """Enqueue the logits of the step's last token, or of all its tokens.

        Raises:
            RuntimeError: layers are missing, or the head is not bound.
            ValueError: more rows than `logit_rows_max`.
        """
        if not self._plans or self._next_layer != len(self._layers):
            raise RuntimeError(f"head enqueued after {self._next_layer} of {len(self._layers)} layers")
        num_tokens = self._plans[0].num_tokens
        num_rows = num_tokens if rows == "all" else 1
        if num_rows > self._limits.logit_rows:
            raise ValueError(f"{num_rows} rows of logits, at most {self._limits.logit_rows}")
        self._head.enqueue_logits(first_token=num_tokens - num_rows, num_tokens=num_rows)
        self._buffers.download_logits(num_rows)
        self._num_logit_rows = num_rows

    def mark(self) -> cl.Event:
        """Return an event for everything enqueued so far, and hand it to the device."""
        self._last_mark = self._device.mark()
        return self._last_mark

    async def wait(self, event: cl.Event) -> None:
        """Wait for an event of `mark`; the newest one ends the step.

        Raises:
            MzdError: ``device_lost`` or ``internal``: the step failed.

        Cancelled: returns only when the event is over, all the same.
        """
        try:
            await self._device.wait(event)
        finally:
            if event is self._last_mark:
                self._plans = []

    def logits(self) -> NDArray[np.float32]:
        """Return the ended step's logits, (rows, vocab) float32: a view, valid until the next `begin`.

        Raises:
            RuntimeError: a step is running, or it had no head.
        """
        self._check_idle()
        if self._num_logit_rows == 0:
            raise RuntimeError("the last step computed no logits")
        return self._buffers.logits[: self._num_logit_rows]

    def close(self) -> None:
        """Free the scratch memory.

        Raises:
            RuntimeError: a step is running.
        """
        self._check_idle()
        self._buffers.free()

    def _write_plans(self, num_tokens: int, position: int) -> list[AttentionPlan]:
        """Plan a step for each shape, and write down what the kernels read of it."""
        plans = [
            plan_attention(shape, self._target, num_tokens=num_tokens, context_tokens=position + num_tokens)
            for shape in self._shapes
        ]
        self._buffers.step[:] = [plan.step() for plan in plans]
        return plans

    def _prepare_layer(self, layer: int) -> None:
        """Check that the step's chunks are bound, and give the device their table if it is new."""
        needed = -(-self._context_tokens // CHUNK_TOKENS)
        if self._num_chunks[layer] < needed:
            raise RuntimeError(f"layer {layer} has {self._num_chunks[layer]} chunks bound, needs {needed}")
        if layer in self._stale_tables:
            self._buffers.upload_chunk_table(layer)
            self._stale_tables.discard(layer)

    def _row_key(self) -> list[AttentionPlan]:
        """What the layers' launches go by, beside what is bound: the position if chunks are arguments."""
        if self._target.chunk_arguments:
            return self._plans
        return [replace(plan, position=0) for plan in self._plans]

    def _enqueue_each_layer(self) -> None:
        for layer, shape_number in zip(self._layers, self._shape_numbers, strict=True):
            layer.enqueue(self._plans[shape_number])

    def _check_idle(self) -> None:
        if self._plans:
            raise RuntimeError("a step is running")

    def _check_step(self, tokens: NDArray[np.int32], position: int) -> None:
        if not 1 <= len(tokens) <= self._limits.tokens:
            raise ValueError(f"a step of {len(tokens)} tokens, expected 1 to {self._limits.tokens}")
        if position < 0 or position + len(tokens) > self._limits.context_tokens:
            raise ValueError(f"tokens at {position} do not fit into {self._limits.context_tokens}")
        ids = tokens.tolist()  # a reduction of NumPy's costs more than a list of a few
        if min(ids) < 0 or max(ids) >= self._config.vocab_size:
            raise ValueError(f"token ids outside 0 to {self._config.vocab_size - 1}")


def _check_head_size(config: ModelConfig) -> None:
    """Refuse channels per head that the kernels would cut off."""
    rotating = [("RoPE dimensions", rope.dimensions) for rope in config.ropes]
    for name, value in (("head_dim", config.head_dim), *rotating):
        if value % _CHANNELS_MULTIPLE:
            raise MzdError(
                "unsupported_architecture",
                f"{name} {value} is not a multiple of {_CHANNELS_MULTIPLE}, which the kernels need",
            )
