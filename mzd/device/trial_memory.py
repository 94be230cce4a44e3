"""Owns the memory of the self-test: inputs and results with the host's view of each, of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mzd.device.opencl import OpenClDevice
from mzd.device.scratch import ScratchBuffer
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import group_layout, unpack
from mzd.formats.weight_store import TensorSpec

_FLOATS = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})


class TrialArray:
    """An array on the device.

    Attributes:
        values: the host's view; `upload` gives it to the device, `TrialMemory.fetch` brings results into it.
        address: for kernels.
    """

    def __init__(self, buffer: ScratchBuffer, values: NDArray[Any]) -> None:
        self.values = values
        self.address = buffer.address
        self._buffer = buffer

    def upload(self) -> None:
        """Give the device what the host wrote."""
        self._buffer.upload(0, self.values.nbytes)

    def download(self) -> None:
        """Enqueue the way back; it is over when the queue is empty."""
        self._buffer.download(0, self.values.nbytes)

    def free(self) -> None:
        """Give the memory back; no kernel may use it."""
        self._buffer.free()


class TrialMemory:
    """Arrays that are freed together, and one source of numbers, the same each time.

    Raises (each method that allocates):
        MzdError: ``insufficient_memory``.
    """

    def __init__(self, device: OpenClDevice) -> None:
        self.device = device
        self.rng = np.random.default_rng(1)
        self._arrays: list[TrialArray] = []

    def put(self, values: NDArray[Any]) -> TrialArray:
        """Copy `values` to the device."""
        array = self.zeros(values.shape, values.dtype)
        array.values[...] = values
        array.upload()
        return array

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> TrialArray:
        """Allocate zeros."""
        buffer = self.device.allocate_scratch(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._arrays.append(TrialArray(buffer, buffer.view(dtype, shape)))
        return self._arrays[-1]

    def normal(self, *shape: int) -> TrialArray:
        """Put normally distributed float32."""
        return self.put(self.rng.standard_normal(shape, np.float32))

    def matrix(
        self, type: GgmlType, rows: int, cols: int
    ) -> tuple[TensorSpec, NDArray[np.float64], TrialArray]:
        """Put a packed random matrix; `rows` a multiple of 8. Return also its spec, and its values."""
        layout = group_layout(type, cols)
        groups = np.zeros((rows // 8, layout.size_bytes), np.uint8)
        headers, scales, payload = layout.headers(groups), layout.scales(groups), layout.payload(groups)
        headers[...] = self.rng.uniform(0.01, 0.02, headers.shape).astype(np.float16).view(np.uint16)
        scales[...] = self.rng.integers(1, 64, scales.shape, np.uint8)
        if type in _FLOATS:
            payload[...] = _as_words(type, self.rng.standard_normal(payload.shape, np.float32))
        else:
            payload[...] = self.rng.integers(0, 1 << 32, payload.shape, payload.dtype)
        spec = TensorSpec("matrix", type, rows, cols, 0, groups.size)
        values = unpack(type, groups.reshape(-1), rows, cols).astype(np.float64)
        return spec, values, self.put(groups)

    def fetch(self, *arrays: TrialArray) -> list[NDArray[Any]]:
        """Wait for everything enqueued; return the values that the device left in `arrays`.

        Raises:
            MzdError: a command failed.
        """
        for array in arrays:
            array.download()
        self.device.finish()
        return [array.values for array in arrays]

    def free(self) -> None:
        """Wait for the queue and give all memory back."""
        self.device.finish()
        for array in self._arrays:
            array.free()


def _as_words(type: GgmlType, values: NDArray[np.float32]) -> NDArray[Any]:
    """Floats as the payload's words; bfloat16 is the upper half of a float32."""
    if type == GgmlType.F16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return bits if type == GgmlType.F32 else (bits >> 16).astype(np.uint16)
