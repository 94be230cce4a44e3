"""Owns the plain read by a kernel: how fast bytes come on this device when nothing is done to them."""

from __future__ import annotations

from typing import Final

import numpy as np

from mzd.device.opencl import OpenClDevice
from mzd.device.trial_memory import TrialArray, TrialMemory
from mzd.errors import MzdError

LINE_BYTES: Final = 64

_CPU_ITEMS_PER_UNIT: Final = 2
"""As the matrix products: few work-items, each with a long run of lines."""

_GPU_GROUP_LANES: Final = 256
_GPU_GROUPS_PER_UNIT: Final = 8
_GPU_LANE_BYTES_MIN: Final = 256
"""A lane leaves four bytes: below this they would count."""


class PlainRead:
    """Reads the rows of an array in turn, a launch each.

    Args:
        source: (rows, row bytes) uint8, a multiple of 64 bytes a row.
        num_launches: as many as rows, unless given.
    """

    def __init__(self, memory: TrialMemory, source: TrialArray, *, num_launches: int | None = None) -> None:
        self._memory = memory
        self._source = source
        num_rows, row_bytes = source.values.shape
        if row_bytes % LINE_BYTES:
            raise ValueError(f"rows of {row_bytes} bytes are no whole lines of {LINE_BYTES}")
        rows = np.arange(num_rows if num_launches is None else num_launches) % num_rows
        self._addresses: list[int] = [source.address + int(row) * row_bytes for row in rows]
        self._last_row = int(rows[-1])
        self._global_size, self._local_size, name = _launch(memory.device, row_bytes)
        self._sums = memory.zeros((self._global_size,), np.uint32)
        device = memory.device
        self._kernel = device.kernel(device.build("plain_read"), name)
        self._kernel.set_address(1, self._sums.address)
        self._kernel.set_int(2, row_bytes // LINE_BYTES)

    def enqueue(self) -> None:
        """Enqueue all launches."""
        for address in self._addresses:
            self._kernel.set_address(0, address)
            self._kernel.enqueue((self._global_size,), (self._local_size,))

    def check(self) -> None:
        """Run, and compare what was read last with the host's copy.

        Raises:
            MzdError: `device_lost`; it has read something else.
        """
        self.enqueue()
        (sums,) = self._memory.fetch(self._sums)
        expected = np.bitwise_xor.reduce(self._source.values[self._last_row].view(np.uint32))
        if np.bitwise_xor.reduce(sums) != expected:
            raise MzdError("device_lost", "the device reads wrong bytes", kernel="plain_read")


def _launch(device: OpenClDevice, size_bytes: int) -> tuple[int, int, str]:
    """Global size, local size and kernel that read `size_bytes` fastest."""
    if device.kernel_class == "cpu":
        return _CPU_ITEMS_PER_UNIT * device.compute_units, 1, "read_runs"
    wanted = -(-size_bytes // (_GPU_LANE_BYTES_MIN * _GPU_GROUP_LANES))
    num_groups = min(wanted, _GPU_GROUPS_PER_UNIT * device.compute_units)
    return num_groups * _GPU_GROUP_LANES, _GPU_GROUP_LANES, "read_strides"
