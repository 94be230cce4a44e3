"""Owns the launches that work on each activation by itself: the MLP's gate, the soft cap of logits."""

from __future__ import annotations

from mzd.device.opencl import OpenClDevice
from mzd.formats.architectures import Activation

_BLOCK = 512
"""Elements of a work-item, BLOCK in elementwise.cl."""


class GatedMul:
    """gate = activation(gate) * up, element by element."""

    def __init__(self, device: OpenClDevice, activation: Activation) -> None:
        program = device.build("elementwise", **{f"GATE_{activation.upper()}": 1})
        self._kernel = device.kernel(program, "gated_mul")

    def enqueue(self, *, gate_address: int, up_address: int, count: int) -> None:
        """Enqueue for `count` float32 elements of each, at least one."""
        self._kernel.set_address(0, gate_address)
        self._kernel.set_address(1, up_address)
        self._kernel.set_int(2, count)
        self._kernel.enqueue((-(-count // _BLOCK),), (1,))


class SoftCap:
    """x = cap * tanh(x / cap), element by element, for float32 at `x_address`."""

    def __init__(self, device: OpenClDevice, cap: float, *, x_address: int) -> None:
        self._kernel = device.kernel(device.build("elementwise"), "soft_cap")
        self._kernel.set_address(0, x_address)
        self._kernel.set_float(2, cap)

    def enqueue(self, count: int) -> None:
        """Enqueue for the first `count` elements, at least one."""
        self._kernel.set_int(1, count)
        self._kernel.enqueue((-(-count // _BLOCK),), (1,))
