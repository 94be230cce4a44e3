"""Owns the launches that work on each activation by itself: the MLP's gate, the soft cap of logits."""

from __future__ import annotations

from mzd.device.opencl import Define, OpenClDevice
from mzd.formats.architectures import Activation

_CPU_BLOCK = 512
"""Elements of a work-item, BLOCK in elementwise.cl."""

_GPU_GROUP_LANES = 256
"""Work-items of a group, one an element."""


class GatedMul:
    """gate = activation(gate) * up, element by element."""

    def __init__(self, device: OpenClDevice, activation: Activation) -> None:
        self._launch = _Launch(device, "gated_mul", **{f"GATE_{activation.upper()}": 1})

    def enqueue(self, *, gate_address: int, up_address: int, count: int) -> None:
        """Enqueue for `count` float32 elements of each, at least one."""
        self._launch.kernel.set_address(0, gate_address)
        self._launch.kernel.set_address(1, up_address)
        self._launch.kernel.set_int(2, count)
        self._launch.enqueue(count)


class SoftCap:
    """x = cap * tanh(x / cap), element by element, for float32 at `x_address`."""

    def __init__(self, device: OpenClDevice, cap: float, *, x_address: int) -> None:
        self._launch = _Launch(device, "soft_cap")
        self._launch.kernel.set_address(0, x_address)
        self._launch.kernel.set_float(2, cap)

    def enqueue(self, count: int) -> None:
        """Enqueue for the first `count` elements, at least one."""
        self._launch.kernel.set_int(1, count)
        self._launch.enqueue(count)


class _Launch:
    """A kernel of the device's class, over any number of elements."""

    def __init__(self, device: OpenClDevice, name: str, **defines: Define) -> None:
        if device.kernel_class == "gpu":
            program = device.build("elementwise_gpu", GROUP_LANES=_GPU_GROUP_LANES, **defines)
            self._group_lanes, self._group_elements = _GPU_GROUP_LANES, _GPU_GROUP_LANES
        else:
            program = device.build("elementwise", **defines)
            self._group_lanes, self._group_elements = 1, _CPU_BLOCK
        self.kernel = device.kernel(program, name)

    def enqueue(self, count: int) -> None:
        """Enqueue for `count` elements."""
        num_groups = -(-count // self._group_elements)
        self.kernel.enqueue((num_groups * self._group_lanes,), (self._group_lanes,))
