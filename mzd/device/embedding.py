"""Owns the launch that looks up the embedding rows of tokens."""

from __future__ import annotations

from mzd.device.opencl import OpenClDevice
from mzd.formats.weight_layout import group_layout
from mzd.formats.weight_store import TensorSpec

_GPU_GROUP_LANES = 64
"""Work-items for a token on a GPU; they share a row's blocks, of which a model has 18 and more."""


class Embedding:
    """x[t] = scale * row tokens[t] of a packed matrix, as float32.

    Args:
        spec: the matrix in its unit.
        tokens_address: (tokens,) int32, each below `spec.rows`.
        x_address: (tokens, cols) float32.
    """

    def __init__(
        self,
        device: OpenClDevice,
        spec: TensorSpec,
        *,
        tokens_address: int,
        x_address: int,
        scale: float = 1.0,
    ) -> None:
        self._group_lanes = _GPU_GROUP_LANES if device.kernel_class == "gpu" else 1
        layout = group_layout(spec.type, spec.cols)
        program = device.build(
            "embedding",
            COLS=spec.cols,
            GROUP_BYTES=layout.size_bytes,
            HEADER_BYTES=layout.header_bytes,
            GROUP_LANES=self._group_lanes,
            **{f"TYPE_{spec.type.name}": 1},
            **({} if scale == 1.0 else {"SCALE": scale}),
        )
        self._kernel = device.kernel(program, "embed")
        self._kernel.set_address(0, tokens_address)
        self._kernel.set_address(2, x_address)
        self._offset_bytes = spec.offset_bytes

    def enqueue(self, weights_address: int, num_tokens: int) -> None:
        """Enqueue for `num_tokens` tokens.

        Args:
            weights_address: of the unit that holds the matrix.
        """
        self._kernel.set_address(1, weights_address + self._offset_bytes)
        self._kernel.enqueue((num_tokens * self._group_lanes,), (self._group_lanes,))
