"""Owns the launches of one model layer: made once, enqueued for every step."""

from __future__ import annotations

from mzd.device.attention import Attention, AttentionPlan
from mzd.device.elementwise import SiluMul
from mzd.device.matmul import Activations, Matmul
from mzd.device.opencl import OpenClDevice
from mzd.device.projections import Projections
from mzd.device.rms_norm import RmsNorm
from mzd.device.rope import RopeKv
from mzd.device.step_buffers import StepBuffers, attention_shape
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import TensorSpec, UnitExtent


class LayerGraph:
    """One layer of a llama: attention and a gated MLP, each behind a norm and added to the residual stream.

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
        activations: Activations,
    ) -> None:
        self._weights_address: int | None = None
        self._attention = _AttentionBlock(device, config, extent, layer, buffers, activations)
        self._mlp = _MlpBlock(device, config, extent, buffers, activations)

    def bind(self, weights_address: int) -> None:
        """Take the layer's weights from the resident unit at `weights_address`."""
        self._weights_address = weights_address

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
    """x += attention(norm(x))."""

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        layer: int,
        buffers: StepBuffers,
        activations: Activations,
    ) -> None:
        self._norm = _block_norm(device, config, extent.tensor("attn_norm"), buffers)
        self._qkv = Projections(
            device,
            [extent.tensor(role) for role in ("attn_q", "attn_k", "attn_v")],
            x_address=buffers.address("normed"),
            y_address=buffers.address("qkv"),
            tokens_max=len(buffers.tokens),
            activations=activations,
        )
        self._rope = RopeKv(
            device,
            attention_shape(config),
            config.rope,
            step_address=buffers.address("step"),
            angles_address=buffers.address("angles"),
            chunk_table_address=buffers.chunk_table_address(layer),
        )
        self._attention = Attention(
            device,
            attention_shape(config),
            step_address=buffers.address("step"),
            chunk_table_address=buffers.chunk_table_address(layer),
            q_address=buffers.address("qkv"),
            out_address=buffers.address("attended"),
            partials_address=buffers.address("partials"),
        )
        self._output = _Residual(device, extent.tensor("attn_output"), "attended", buffers, activations)

    def enqueue(self, weights_address: int, plan: AttentionPlan) -> None:
        self._norm.enqueue(weights_address, plan.num_tokens)
        self._qkv.enqueue(weights_address, plan.num_tokens)
        self._rope.enqueue(
            q_address=self._qkv.output_address(0, plan.num_tokens),
            k_address=self._qkv.output_address(1, plan.num_tokens),
            v_address=self._qkv.output_address(2, plan.num_tokens),
            num_tokens=plan.num_tokens,
        )
        self._attention.enqueue(plan)
        self._output.enqueue(weights_address, plan.num_tokens)


class _MlpBlock:
    """x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        buffers: StepBuffers,
        activations: Activations,
    ) -> None:
        self._ffn_size = config.ffn_size
        self._norm = _block_norm(device, config, extent.tensor("ffn_norm"), buffers)
        self._gate_up = Projections(
            device,
            [extent.tensor(role) for role in ("ffn_gate", "ffn_up")],
            x_address=buffers.address("normed"),
            y_address=buffers.address("gate_up"),
            tokens_max=len(buffers.tokens),
            activations=activations,
        )
        self._silu = SiluMul(device)
        self._down = _Residual(device, extent.tensor("ffn_down"), "gate_up", buffers, activations)

    def enqueue(self, weights_address: int, num_tokens: int) -> None:
        self._norm.enqueue(weights_address, num_tokens)
        self._gate_up.enqueue(weights_address, num_tokens)
        self._silu.enqueue(
            gate_address=self._gate_up.output_address(0, num_tokens),
            up_address=self._gate_up.output_address(1, num_tokens),
            count=num_tokens * self._ffn_size,
        )
        self._down.enqueue(weights_address, num_tokens)


class _Residual:
    """x += y W^T: the product that a block adds to the residual stream; y is the buffer `source`."""

    def __init__(
        self,
        device: OpenClDevice,
        spec: TensorSpec,
        source: str,
        buffers: StepBuffers,
        activations: Activations,
    ) -> None:
        self._matmul = Matmul(device, spec, tokens_max=len(buffers.tokens), activations=activations)
        self._offset_bytes = spec.offset_bytes
        self._source_address = buffers.address(source)
        self._x_address = buffers.address("x")

    def enqueue(self, weights_address: int, num_tokens: int) -> None:
        self._matmul.enqueue(
            weights_address=weights_address + self._offset_bytes,
            x_address=self._source_address,
            y_address=self._x_address,
            num_tokens=num_tokens,
            accumulate=True,
        )


def _block_norm(device: OpenClDevice, config: ModelConfig, spec: TensorSpec, buffers: StepBuffers) -> RmsNorm:
    """The norm before a block: from the residual stream into the buffer that its matrices read."""
    x_address, y_address = buffers.address("x"), buffers.address("normed")
    return RmsNorm(device, spec, config.rms_eps, x_address=x_address, y_address=y_address)
