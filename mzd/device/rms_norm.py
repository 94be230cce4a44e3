"""Owns the launch of RMS normalisation."""

from __future__ import annotations

from mzd.device.opencl import Define, OpenClDevice
from mzd.formats.weight_store import TensorSpec

_GPU_GROUP_LANES = 256
"""Work-items for a row on a GPU: one token alone has to fill the time that memory takes to answer."""


class RmsNorm:
    """Normalises rows from `x_address` into `y_address`, (tokens, cols) float32 both.

    Args:
        spec: the norm's weights in their unit, (cols,) float32.
        accumulate: add to y instead of replacing it.
    """

    def __init__(
        self,
        device: OpenClDevice,
        spec: TensorSpec,
        eps: float,
        *,
        x_address: int,
        y_address: int,
        accumulate: bool = False,
    ) -> None:
        defines: dict[str, Define] = {"ACCUMULATE": 1} if accumulate else {}
        self._group_lanes = 1
        if device.kernel_class == "gpu":
            self._group_lanes = _GPU_GROUP_LANES
            program = device.build("norm_gpu", GROUP_LANES=self._group_lanes, **defines)
        else:
            program = device.build("norm", **defines)
        self._kernel = device.kernel(program, "rms_norm")
        self._kernel.set_address(2, y_address)
        self._kernel.set_int(3, spec.cols)
        self._kernel.set_float(4, eps)
        self._offset_bytes = spec.offset_bytes
        self._x_address = x_address
        self._row_bytes = spec.cols * 4

    def enqueue(self, weights_address: int, num_rows: int, *, first_row: int = 0) -> None:
        """Normalise `num_rows` rows from `first_row` on; the result begins at row 0 of y.

        Args:
            weights_address: of the unit that holds the weights.
        """
        self._kernel.set_address(0, self._x_address + first_row * self._row_bytes)
        self._kernel.set_address(1, weights_address + self._offset_bytes)
        self._kernel.enqueue((num_rows * self._group_lanes,), (self._group_lanes,))
