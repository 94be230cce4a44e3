"""Owns several matrices over the same activations: their products lie one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from mzd.device.block_input import BlockInput
from mzd.device.opencl import OpenClDevice
from mzd.device.product_plan import ProductPlan
from mzd.formats.weight_layout import ROWS_PER_GROUP
from mzd.formats.weight_store import TensorSpec


class Projections:
    """y_i = x W_i^T for matrices of one unit; y_i is (tokens, rows of W_i), right behind y_(i-1).

    For one token, where launches count, matrices that lie behind each other in the unit are one matrix
    with all their rows: the same bytes, one launch. (For more tokens its rows of y would be interleaved.)
    A norm before them is part of that launch where there are kernels for it.

    Args:
        source: what x is.
        y_address: room for `tokens_max` tokens of every matrix.
    """

    def __init__(
        self,
        device: OpenClDevice,
        specs: Sequence[TensorSpec],
        source: BlockInput,
        *,
        y_address: int,
        tokens_max: int,
        products: ProductPlan,
    ) -> None:
        self._source = source
        self._y_address = y_address
        self._each = [
            (spec.offset_bytes, products.matmul(device, spec, tokens_max=tokens_max)) for spec in specs
        ]
        self._joined = [source.token_product(spec, products) for spec in join_rows(specs)]
        self._row_offsets = [0, *accumulate(spec.rows for spec in specs)]
        self._joined_row_offsets = [0, *accumulate(spec.rows for spec in join_rows(specs))]

    def output_address(self, index: int, num_tokens: int) -> int:
        """Where the product of matrix `index` begins in a step of `num_tokens`."""
        return self._y_address + 4 * num_tokens * self._row_offsets[index]

    def enqueue(self, weights_address: int, num_tokens: int) -> None:
        """Enqueue all products for the unit at `weights_address`, and before them what x is."""
        if num_tokens > 1 or not self._source.is_fused:
            self._source.enqueue(weights_address, num_tokens)
        if num_tokens == 1:
            for product, row_offset in zip(self._joined, self._joined_row_offsets, strict=False):
                product.enqueue(weights_address, self._y_address + 4 * row_offset)
            return
        for (offset_bytes, matmul), row_offset in zip(self._each, self._row_offsets, strict=False):
            matmul.enqueue(
                weights_address=weights_address + offset_bytes,
                x_address=self._source.address,
                y_address=self._y_address + 4 * num_tokens * row_offset,
                num_tokens=num_tokens,
            )


def join_rows(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Join neighbours whose packed rows follow each other in the unit into one matrix each."""
    joined = [specs[0]]
    for before, spec in pairwise(specs):
        if _follows(before, spec):
            last = joined[-1]
            joined[-1] = replace(
                last, rows=last.rows + spec.rows, size_bytes=last.size_bytes + spec.size_bytes
            )
        else:
            joined.append(spec)
    return joined


def _follows(before: TensorSpec, spec: TensorSpec) -> bool:
    """Whether `spec` continues the row groups of `before`: no padded group, no gap, the same rows."""
    return (
        (before.type, before.cols) == (spec.type, spec.cols)
        and before.rows % ROWS_PER_GROUP == 0
        and before.offset_bytes + before.size_bytes == spec.offset_bytes
    )
