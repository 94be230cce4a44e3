"""Owns matrix products in the bench `kernels`: packed weights in copies, both kinds of activations."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.kernel_work import (
    EXACT_TOLERANCE,
    INT8_TOLERANCE,
    KernelGroup,
    PeerOperands,
    Variant,
    Work,
    repeated,
    require_near,
    sweep_launches,
)
from mzd.benchmarks.plain_read import PlainRead
from mzd.device.matmul import INT8_TYPES, Activations, Matmul
from mzd.device.trial_memory import TrialArray, TrialMemory
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_layout import ROWS_PER_GROUP, packed_size_bytes, unpack_blocks
from mzd.formats.weight_store import TensorSpec

_PATTERN_ROWS: Final = 61 * ROWS_PER_GROUP
"""Rows drawn, and then repeated: speed does not depend on the values."""


def matmul_group(memory: TrialMemory, type: GgmlType, rows: int, cols: int, num_tokens: int) -> KernelGroup:
    """y = x W^T for W of `rows` x `cols` weights; `rows` a multiple of 8."""
    size_bytes = packed_size_bytes(type, rows, cols)
    work = Work(
        f"matmul {type.name.lower()}", f"{rows}x{cols}", num_tokens, size_bytes, 2 * num_tokens * rows * cols
    )
    num_copies = sweep_launches(size_bytes, work.flops)
    product = _Product(memory, type, rows, cols, num_tokens, num_copies)
    modes: tuple[Activations, ...] = ("f32", "int8") if type in INT8_TYPES else ("f32",)
    return KernelGroup(
        work,
        num_copies,
        tuple(product.variant(work.kernel, mode) for mode in modes),
        PlainRead(memory, product.weights),
        product.peer_operands,
    )


class _Product:
    """Operands of one product.

    Attributes:
        weights: (copies, packed bytes) uint8.
        x, y: (tokens, cols) and (tokens, rows) float32.
        expected: (tokens, rows) float64.
    """

    def __init__(
        self, memory: TrialMemory, type: GgmlType, rows: int, cols: int, num_tokens: int, num_copies: int
    ) -> None:
        self._memory = memory
        pattern_rows = min(rows, _PATTERN_ROWS)
        _, values, pattern = memory.matrix(type, pattern_rows, cols)
        size_bytes = packed_size_bytes(type, rows, cols)
        self.weights: TrialArray = memory.zeros((num_copies, size_bytes), np.uint8)
        repeated(np.resize(pattern.values, size_bytes)[np.newaxis], self.weights)
        self.x = memory.normal(num_tokens, cols)
        self.y = memory.zeros((num_tokens, rows))
        products = self.x.values.astype(np.float64) @ values.T
        self.expected: NDArray[np.float64] = np.resize(products.T, (rows, num_tokens)).T
        self._spec = TensorSpec("matrix", type, rows, cols, 0, size_bytes)

    def peer_operands(self) -> PeerOperands:
        """The same matrix and activations for llama.cpp."""
        spec = self._spec
        raw = np.ascontiguousarray(unpack_blocks(spec.type, self.weights.values[0], spec.rows, spec.cols))
        return PeerOperands(spec.type, raw, self.x.values, self.expected)

    def variant(self, kernel: str, activations: Activations) -> Variant:
        """The kernel for one kind of activations."""
        matmul = Matmul(
            self._memory.device, self._spec, tokens_max=len(self.x.values), activations=activations
        )
        name = f"{kernel} {activations}"
        rounds = activations == "int8" and self._spec.type in INT8_TYPES
        tolerance = INT8_TOLERANCE if rounds else EXACT_TOLERANCE
        return Variant(name, partial(self._enqueue, matmul), partial(self._check, matmul, name, tolerance))

    def _enqueue(self, matmul: Matmul) -> None:
        num_copies, size_bytes = self.weights.values.shape
        for copy in range(num_copies):
            matmul.enqueue(
                weights_address=self.weights.address + copy * size_bytes,
                x_address=self.x.address,
                y_address=self.y.address,
                num_tokens=len(self.x.values),
            )

    def _check(self, matmul: Matmul, name: str, tolerance: float) -> None:
        self.y.values[...] = np.nan
        self.y.upload()
        self._enqueue(matmul)
        (y,) = self._memory.fetch(self.y)
        what = f"{name}, {self._spec.rows}x{self._spec.cols}, {len(y)} tokens"
        require_near(what, y, self.expected, tolerance)
