"""Owns what the matrix products of every kernel class share: their shapes, and which weights take int8."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from mzd.formats.ggml_types import GgmlType

Activations = Literal["f32", "int8"]

INT8_TYPES = frozenset(
    {GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K}
)
"""Weights that are multiplied as integers with ``activations="int8"``; others stay exact."""


class WeightShape(Protocol):
    """What a product needs to know of a matrix; `TensorSpec` has it."""

    @property
    def type(self) -> GgmlType: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...


class Operands(NamedTuple):
    """What one product works on: addresses, and whether y is added to; see `Matmul.enqueue`."""

    weights: int
    x: int
    y: int
    num_tokens: int
    accumulate: bool


class Product(Protocol):
    """The launches of one kernel class for one matrix shape."""

    def enqueue(self, operands: Operands) -> None:
        """Enqueue what computes y for at least one token."""
        ...

    def free(self) -> None:
        """Give back what this product allocated; no launch may be running."""
        ...


def divide_up(value: int, divisor: int) -> int:
    """The smallest integer that is not below value / divisor."""
    return -(-value // divisor)
