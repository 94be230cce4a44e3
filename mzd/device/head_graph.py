"""Owns the launches that use the head unit: the embedding of tokens, and the logits."""

from __future__ import annotations

from mzd.device.elementwise import SoftCap
from mzd.device.embedding import Embedding
from mzd.device.opencl import OpenClDevice
from mzd.device.product_plan import ProductPlan
from mzd.device.replay import Replay
from mzd.device.rms_norm import RmsNorm
from mzd.device.step_buffers import StepBuffers
from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import UnitExtent


class HeadGraph:
    """Embedding before the first layer; norm, output matrix and soft cap after the last.

    Args:
        extent: where the tensors lie in the head unit; a tied model has no ``output``.
        buffers: the step's scratch.
    """

    def __init__(
        self,
        device: OpenClDevice,
        config: ModelConfig,
        extent: UnitExtent,
        buffers: StepBuffers,
        products: ProductPlan,
    ) -> None:
        self._buffers = buffers
        self._address: int | None = None
        self._embedding_row = Replay(device.kernel_queue)
        self._logits_row = Replay(device.kernel_queue)
        embedding = extent.tensor("token_embd")
        output = embedding if config.tied_output else extent.tensor("output")
        self._embedding = Embedding(
            device,
            embedding,
            tokens_address=buffers.address("tokens"),
            x_address=buffers.address("x"),
            scale=config.embedding_scale,
        )
        self._norm = RmsNorm(
            device,
            extent.tensor("output_norm"),
            config.rms_eps,
            x_address=buffers.address("x"),
            y_address=buffers.address("normed"),
        )
        self._matmul = products.exact().matmul(device, output, tokens_max=len(buffers.logits))
        self._output_offset = output.offset_bytes
        self._vocab_size = config.vocab_size
        cap = config.logit_softcap
        self._soft_cap = None if cap is None else SoftCap(device, cap, x_address=buffers.address("logits"))

    def bind(self, address: int) -> None:
        """Use the resident head unit at `address`."""
        self._address = address

    def unbind(self) -> None:
        """Forget the unit, which is about to go."""
        self._address = None

    def enqueue_embedding(self, num_tokens: int) -> None:
        """Enqueue the embedding of the step's tokens into x.

        Raises:
            RuntimeError: the head unit is not bound.
        """
        address = self._bound_address()
        self._embedding_row.run((address, num_tokens), lambda: self._embedding.enqueue(address, num_tokens))

    def enqueue_logits(self, *, first_token: int, num_tokens: int) -> None:
        """Enqueue the logits of `num_tokens` tokens of the step into rows 0 and on.

        Raises:
            RuntimeError: the head unit is not bound.
        """
        address = self._bound_address()
        key = (address, first_token, num_tokens)
        self._logits_row.run(key, lambda: self._enqueue_logits(address, first_token, num_tokens))

    def _enqueue_logits(self, address: int, first_token: int, num_tokens: int) -> None:
        self._norm.enqueue(address, num_tokens, first_row=first_token)
        self._matmul.enqueue(
            weights_address=address + self._output_offset,
            x_address=self._buffers.address("normed"),
            y_address=self._buffers.address("logits"),
            num_tokens=num_tokens,
        )
        if self._soft_cap is not None:
            self._soft_cap.enqueue(num_tokens * self._vocab_size)

    def _bound_address(self) -> int:
        if self._address is None:
            raise RuntimeError("head enqueued while its unit is not resident")
        return self._address
