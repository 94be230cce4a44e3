"""Owns the launches of one model layer: made once, enqueued for every step."""

from __future__ import annotations

from mzd.device.attention import Attention, AttentionPlan
from mzd.device.kernel import BoundKernel
from mzd.device.matmul import Matmul
from mzd.device.opencl import OpenClDevice
from mzd.device.step_buffers import StepBuffers, attention_shape
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import UnitExtent
from mzd.policy.units import CHUNK_TOKENS

_ONE = (1,)
_SILU_BLOCK = 512
"""Elements of a work-item of silu_mul, BLOCK in elementwise.cl."""

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class RmsNorm:
    """Normalise rows of `cols` floats from `x_address` into `y_address`."""

    def __init__(
        self, device: OpenClDevice, cols: int, eps: float, *, x_address: int, y_address: int
    ) -> None:
        self._kernel = device.kernel(device.build("norm"), "rms_norm")
        self._kernel.set_address(0, x_address)
        self._kernel.set_address(2, y_address)
        self._kernel.set_int(3, cols)
        self._kernel.set_float(4, eps)
        self._x_address = x_address
        self._row_bytes = cols * 4

    def enqueue(self, weight_address: int, num_rows: int, *, first_row: int = 0) -> None:
        """Normalise `num_rows` rows from `first_row` on; the result begins at row 0 of y."""
        self._kernel.set_address(0, self._x_address + first_row * self._row_bytes)
        self._kernel.set_address(1, weight_address)
        self._kernel.enqueue((num_rows,), _ONE)


class LayerGraph:
    """One layer of a llama: attention and a gated MLP, each behind a norm and added to the residual stream.

    Arguments that never change are set here; a step sets none but its number of tokens.

    Args:
        extent: where the layer's tensors lie in its weight unit.
        buffers: the step's scratch, shared by all layers.
    """

    def __init__(
        self, device: OpenClDevice, config: ModelConfig, extent: UnitExtent, layer: int, buffers: StepBuffers
    ) -> None:
        self._buffers = buffers
        self._ffn_size = config.ffn_size
        self._tokens_max = len(buffers.tokens)
        self._offsets = {spec.role: spec.offset_bytes for spec in extent.tensors}
        self._weights_address: int | None = None
        self._norm = RmsNorm(
            device,
            config.hidden_size,
            config.rms_eps,
            x_address=buffers.address("x"),
            y_address=buffers.address("normed"),
        )
        self._matmuls = {
            role: Matmul(device, extent.tensor(role), tokens_max=self._tokens_max) for role in _MATRICES
        }
        self._rope = _rope_kernel(device, config, layer, buffers)
        self._attention = Attention(
            device,
            attention_shape(config),
            step_address=buffers.address("step"),
            chunk_table_address=buffers.chunk_table_address(layer),
            q_address=buffers.address("q"),
            out_address=buffers.address("attended"),
            partials_address=buffers.address("partials"),
        )
        self._silu = device.kernel(device.build("elementwise"), "silu_mul")
        self._silu.set_address(0, buffers.address("gate"))
        self._silu.set_address(1, buffers.address("up"))

    @property
    def is_bound(self) -> bool:
        """Whether the layer's weights are resident."""
        return self._weights_address is not None

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
        self._enqueue_attention(self._weights_address, plan)
        self._enqueue_mlp(self._weights_address, plan.num_tokens)

    def _enqueue_attention(self, weights_address: int, plan: AttentionPlan) -> None:
        num_tokens = plan.num_tokens
        self._norm.enqueue(weights_address + self._offsets["attn_norm"], num_tokens)
        self._multiply("attn_q", weights_address, "normed", "q", num_tokens)
        self._multiply("attn_k", weights_address, "normed", "k", num_tokens)
        self._multiply("attn_v", weights_address, "normed", "v", num_tokens)
        self._rope.enqueue((num_tokens,), _ONE)
        self._attention.enqueue(plan)
        self._multiply("attn_output", weights_address, "attended", "x", num_tokens, accumulate=True)

    def _enqueue_mlp(self, weights_address: int, num_tokens: int) -> None:
        self._norm.enqueue(weights_address + self._offsets["ffn_norm"], num_tokens)
        self._multiply("ffn_gate", weights_address, "normed", "gate", num_tokens)
        self._multiply("ffn_up", weights_address, "normed", "up", num_tokens)
        count = num_tokens * self._ffn_size
        self._silu.set_int(2, count)
        self._silu.enqueue((-(-count // _SILU_BLOCK),), _ONE)
        self._multiply("ffn_down", weights_address, "gate", "x", num_tokens, accumulate=True)

    def _multiply(
        self, role: str, weights_address: int, x: str, y: str, num_tokens: int, *, accumulate: bool = False
    ) -> None:
        """Enqueue y = x W^T, or y += x W^T, between two buffers of the step."""
        self._matmuls[role].enqueue(
            weights_address=weights_address + self._offsets[role],
            x_address=self._buffers.address(x),
            y_address=self._buffers.address(y),
            num_tokens=num_tokens,
            accumulate=accumulate,
        )


def _rope_kernel(device: OpenClDevice, config: ModelConfig, layer: int, buffers: StepBuffers) -> BoundKernel:
    """Make the kernel that rotates q and k and writes k and v into the layer's chunks."""
    program = device.build(
        "rope",
        NUM_HEADS=config.num_heads,
        NUM_KV_HEADS=config.num_kv_heads,
        HEAD_DIM=config.head_dim,
        ROPE_DIMS=config.rope.dimensions,
        ROPE_HALVES=config.rope.style == "halves",
        CHUNK_TOKENS=CHUNK_TOKENS,
    )
    kernel = device.kernel(program, "rope_kv", follows_pointers=True)
    for i, name in enumerate(("step", "angles", "q", "k", "v")):
        kernel.set_address(i, buffers.address(name))
    kernel.set_address(5, buffers.chunk_table_address(layer))
    return kernel
