"""Owns the launch of the gated activation of an MLP."""

from __future__ import annotations

from mzd.device.opencl import OpenClDevice

_BLOCK = 512
"""Elements of a work-item, BLOCK in elementwise.cl."""


class SiluMul:
    """gate = silu(gate) * up, element by element."""

    def __init__(self, device: OpenClDevice) -> None:
        self._kernel = device.kernel(device.build("elementwise"), "silu_mul")

    def enqueue(self, *, gate_address: int, up_address: int, count: int) -> None:
        """Enqueue for `count` float32 elements of each, at least one."""
        self._kernel.set_address(0, gate_address)
        self._kernel.set_address(1, up_address)
        self._kernel.set_int(2, count)
        self._kernel.enqueue((-(-count // _BLOCK),), (1,))
