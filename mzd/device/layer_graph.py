"""Owns the launches of one model layer: made once, enqueued for every step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mzd.device.attention import Attention, AttentionPlan
from mzd.device.block_input import BlockInput
from mzd.device.elementwise import GatedMul
from mzd.device.matmul_cpu import FusedCpuProduct
from mzd.device.opencl import OpenClDevice
from mzd.device.product_plan import ProductPlan
from mzd.device.projections import Projections
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import QkvVectors, RopeKv
from mzd.device.step_buffers import StepBuffers, attention_shape, attention_shapes
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import UnitExtent


class LayerGraph:
    """One layer: attention and a gated MLP, each added to the residual stream, as the model describes them.

    Arguments that never change are set here. A step sets those that depend on its number of tokens, and
    none if the step before had as many.

    Args:
        extent: where the layer's tensors lie in its weight unit.
        buffers: the step's scratch, shared by all layers.
    """

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        layer: int,
        buffers: StepBuffers,
        products: ProductPlan,
    ) -> None:
        self._weights_address: int | None = None
        self._attention = _AttentionBlock(device, config, extent, layer, buffers, products)
        self._mlp = _MlpBlock(device, config, extent, buffers, products)

    def bind(self, weights_address: int, chunk_addresses: NDArray[np.uint64]) -> None:
        """Take the layer's weights from the resident unit at `weights_address`, and its chunks, (chunks,)."""
        self._weights_address = weights_address
        self._attention.bind_chunks(chunk_addresses)

    def unbind(self) -> None:
        """Forget the weights, which are about to go."""
        self._weights_address = None

    def enqueue(self, plan: AttentionPlan) -> None:
        """Enqueue the layer for the step that the buffers hold.

        Raises:
            RuntimeError: the layer is not bound.
        """
        if self._weights_address is None:
            raise RuntimeError("layer enqueued while its weights are not resident")
        self._attention.enqueue(self._weights_address, plan)
        self._mlp.enqueue(self._weights_address, plan.num_tokens)


class _AttentionBlock:
    """x += attention(x), with the norms that the model has."""

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        layer: int,
        buffers: StepBuffers,
        products: ProductPlan,
    ) -> None:
        self._qkv = Projections(
            device,
            [extent.tensor(role) for role in ("attn_q", "attn_k", "attn_v")],
            _block_input(device, config, extent, "attn_norm", buffers),
            y_address=buffers.address("qkv"),
            tokens_max=len(buffers.tokens),
            products=products.exact(),
        )
        self._rope = _rope_kv(device, config, extent, layer, buffers)
        self._attention = _attention(device, config, layer, buffers)
        self._output = _Residual(
            device, config, extent, ("attn_output", "post_attention_norm"), "attended", buffers, products
        )

    def bind_chunks(self, addresses: NDArray[np.uint64]) -> None:
        self._rope.bind_chunks(addresses)
        self._attention.bind_chunks(addresses)

    def enqueue(self, weights_address: int, plan: AttentionPlan) -> None:
        self._qkv.enqueue(weights_address, plan.num_tokens)
        self._rope.enqueue(
            weights_address,
            q_address=self._qkv.output_address(0, plan.num_tokens),
            k_address=self._qkv.output_address(1, plan.num_tokens),
            v_address=self._qkv.output_address(2, plan.num_tokens),
            num_tokens=plan.num_tokens,
            position=plan.position,
        )
        self._attention.enqueue(plan)
        self._output.enqueue(weights_address, plan.num_tokens)


class _MlpBlock:
    """x += down(activation(gate(x)) * up(x)), with the norms that the model has."""

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        buffers: StepBuffers,
        products: ProductPlan,
    ) -> None:
        self._gate_up = Projections(
            device,
            [extent.tensor(role) for role in ("ffn_gate", "ffn_up")],
            _block_input(device, config, extent, "ffn_norm", buffers),
            y_address=buffers.address("gate_up"),
            tokens_max=len(buffers.tokens),
            products=products,
        )
        self._down = _GatedResidual(
            device, config, extent, ("ffn_down", "post_ffw_norm"), "gate_up", buffers, products
        )

    def enqueue(self, weights_address: int, num_tokens: int) -> None:
        self._gate_up.enqueue(weights_address, num_tokens)
        self._down.enqueue(weights_address, num_tokens)


class _Residual:
    """x += y W^T, or x += norm(y W^T): what a block adds to the residual stream; y is the buffer `source`.

    Args:
        roles: of the matrix, and of the norm where the model has one.
    """

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        roles: tuple[str, str],
        source: str,
        buffers: StepBuffers,
        products: ProductPlan,
    ) -> None:
        spec = extent.tensor(roles[0])
        self._matmul = products.matmul(device, spec, tokens_max=len(buffers.tokens))
        self._offset_bytes = spec.offset_bytes
        self._source_address = buffers.address(source)
        self._y_address = buffers.address("x")
        self._norm: RmsNorm | None = None
        if config.description.norm_after:
            self._y_address = buffers.address("normed")  # the block has read it by now
            self._norm = RmsNorm(
                device,
                extent.tensor(roles[1]),
                config.rms_eps,
                x_address=self._y_address,
                y_address=buffers.address("x"),
                accumulate=True,
            )

    def enqueue(self, weights_address: int, num_tokens: int) -> None:
        self._enqueue_product(weights_address + self._offset_bytes, num_tokens)
        if self._norm is not None:
            self._norm.enqueue(weights_address, num_tokens)

    def _enqueue_product(self, matrix_address: int, num_tokens: int) -> None:
        self._matmul.enqueue(
            weights_address=matrix_address,
            x_address=self._source_address,
            y_address=self._y_address,
            num_tokens=num_tokens,
            accumulate=self._norm is None,
        )


class _GatedResidual(_Residual):
    """The same of activation(gate) * up, which lie in the buffer `source`, one behind the other.

    For one token it is part of the product's launch, where there is a kernel for that.
    """

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        roles: tuple[str, str],
        source: str,
        buffers: StepBuffers,
        products: ProductPlan,
    ) -> None:
        super().__init__(device, config, extent, roles, source, buffers, products)
        activation = config.description.activation
        self._ffn_size = config.ffn_size
        self._gated = GatedMul(device, activation)
        self._fused: FusedCpuProduct | None = None
        if device.kernel_class == "cpu":
            spec = extent.tensor(roles[0])
            self._fused = FusedCpuProduct(
                device, spec, activations=products.activations, activation=activation
            )

    def _enqueue_product(self, matrix_address: int, num_tokens: int) -> None:
        up_address = self._source_address + 4 * num_tokens * self._ffn_size
        if self._fused is None or num_tokens > 1:
            count = num_tokens * self._ffn_size
            self._gated.enqueue(gate_address=self._source_address, up_address=up_address, count=count)
            super()._enqueue_product(matrix_address, num_tokens)
            return
        self._fused.enqueue(
            weights_address=matrix_address,
            x_address=self._source_address,
            other_address=up_address,
            y_address=self._y_address,
            accumulate=self._norm is None,
        )


def _block_input(
    device: OpenClDevice, config: ModelConfig, extent: UnitExtent, role: str, buffers: StepBuffers
) -> BlockInput:
    """What a block's matrices read: the residual stream, or its norm if the model has one there."""
    x_address = buffers.address("x")
    if not config.description.norm_before:
        return BlockInput(device, x_address=x_address)
    return BlockInput(
        device,
        x_address=x_address,
        norm=extent.tensor(role),
        eps=config.rms_eps,
        normed_address=buffers.address("normed"),
    )


def _rope_kv(
    device: OpenClDevice, config: ModelConfig, extent: UnitExtent, layer: int, buffers: StepBuffers
) -> RopeKv:
    """What q, k and v of a layer pass before attention."""
    facts = config.layers[layer]
    return RopeKv(
        device,
        attention_shape(config, facts),
        None if facts.rope is None else config.ropes[facts.rope],
        _qkv_vectors(config, extent),
        step_address=buffers.step_address(0),  # the position is the same for all shapes
        angles_address=buffers.angles_address(facts.rope),
        chunk_table_address=buffers.chunk_table_address(layer),
    )


def _qkv_vectors(config: ModelConfig, extent: UnitExtent) -> QkvVectors:
    biases = ("attn_q_bias", "attn_k_bias", "attn_v_bias") if config.description.qkv_bias else ()
    norms = ("attn_q_norm", "attn_k_norm") if config.description.qk_norm else ()
    return QkvVectors(
        biases=tuple(extent.tensor(role) for role in biases),
        norms=tuple(extent.tensor(role) for role in norms),
        eps=config.rms_eps,
    )


def _attention(device: OpenClDevice, config: ModelConfig, layer: int, buffers: StepBuffers) -> Attention:
    shape = attention_shape(config, config.layers[layer])
    return Attention(
        device,
        shape,
        step_address=buffers.step_address(attention_shapes(config).index(shape)),
        chunk_table_address=buffers.chunk_table_address(layer),
        q_address=buffers.address("qkv"),
        out_address=buffers.address("attended"),
        partials_address=buffers.address("partials"),
    )
