"""Owns matrix products with packed weights: one object per call site, kernels by the device's class."""

from __future__ import annotations

from collections.abc import Mapping

from mzd.device.matmul_choice import Choice, ProductKey
from mzd.device.matmul_cpu import ExactCpuProduct, Int8CpuProduct
from mzd.device.matmul_gpu import GpuProduct, rounded_bytes
from mzd.device.matmul_shape import INT8_TYPES, Activations, Operands, Product, WeightShape
from mzd.device.opencl import OpenClDevice

__all__ = ["INT8_TYPES", "Activations", "Matmul", "WeightShape", "rounded_bytes"]


class Matmul:
    """y = x W^T, or y += x W^T, for one matrix shape at one call site.

    Kernel objects are this call site's own, so that a launch sets only the arguments that changed.

    Args:
        spec: element type, rows (outputs) and cols (inputs) of W.
        tokens_max: the largest `num_tokens` of `enqueue`.
        activations: ``f32`` is exact (max |dy| / max |y| <= 5e-6); ``int8`` rounds x to 8 bits in blocks of
            32 for the types of `INT8_TYPES` (<= 1e-2).
        choices: launch shapes that were measured on a GPU (`autotune`); the rest is by rule.
        rounded_address: `rounded_bytes(tokens_max, cols)` of the device's memory, which all products of a
            queue may share: a GPU with ``int8`` keeps rounded tokens there. None for memory of its own.

    Raises:
        FormatError: `unsupported_type`, or `cols` is no multiple of the type's block.
        MzdError: `insufficient_memory`.
    """

    def __init__(
        self,
        device: OpenClDevice,
        spec: WeightShape,
        *,
        tokens_max: int,
        activations: Activations = "f32",
        choices: Mapping[ProductKey, Choice] | None = None,
        rounded_address: int | None = None,
    ) -> None:
        self._tokens_max = tokens_max
        int8 = activations == "int8" and spec.type in INT8_TYPES
        self._product: Product
        if device.kernel_class == "gpu":
            self._product = GpuProduct(
                device,
                spec,
                tokens_max=tokens_max,
                int8=int8,
                choices=choices or {},
                rounded_address=rounded_address,
            )
        else:
            self._product = Int8CpuProduct(device, spec) if int8 else ExactCpuProduct(device, spec)

    def enqueue(
        self,
        *,
        weights_address: int,
        x_address: int,
        y_address: int,
        num_tokens: int,
        accumulate: bool = False,
    ) -> None:
        """Enqueue the product of `num_tokens` rows of x; nothing happens for none.

        Args:
            weights_address: of the packed matrix, a multiple of 64; resident until the launch is over.
            x_address: (num_tokens, cols) float32, C-contiguous; on a GPU a multiple of 16.
            y_address: (num_tokens, rows) float32, C-contiguous; may not overlap x.
            accumulate: add to y instead of replacing it.

        Raises:
            ValueError: `num_tokens` is negative or above `tokens_max`.
        """
        if not 0 <= num_tokens <= self._tokens_max:
            raise ValueError(f"{num_tokens} tokens, at most {self._tokens_max}")
        if num_tokens > 0:
            self._product.enqueue(Operands(weights_address, x_address, y_address, num_tokens, accumulate))

    def free(self) -> None:
        """Give back memory of its own, if it has any; no launch may be running."""
        self._product.free()
