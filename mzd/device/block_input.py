"""Owns what a block's matrices read, the residual stream or its norm, and their products for one token."""

from __future__ import annotations

from typing import Protocol

from mzd.device.matmul_cpu import FusedCpuProduct
from mzd.device.opencl import OpenClDevice
from mzd.device.product_plan import ProductPlan
from mzd.device.rms_norm import RmsNorm
from mzd.formats.weight_store import TensorSpec


class TokenProduct(Protocol):
    """The product of one token with a matrix of a unit."""

    def enqueue(self, unit_address: int, y_address: int) -> None:
        """Enqueue for the unit at `unit_address`; y is (rows,) float32."""
        ...


class BlockInput:
    """(tokens, cols) float32: x itself, or its RMS norm.

    Args:
        x_address: (tokens, cols) float32.
        norm: the norm's weights in their unit; None: x as it is.
        normed_address: room for the norm.

    Attributes:
        address: where it lies once `enqueue` has run.
        is_fused: `token_product` does what `enqueue` would.
    """

    def __init__(
        self,
        device: OpenClDevice,
        *,
        x_address: int,
        norm: TensorSpec | None = None,
        eps: float = 0.0,
        normed_address: int = 0,
    ) -> None:
        self._device = device
        self._x_address = x_address
        self._norm_weights = norm
        self._eps = eps
        self.address = x_address if norm is None else normed_address
        self.is_fused = norm is not None and device.kernel_class == "cpu"
        self._norm: RmsNorm | None = None
        if norm is not None:
            self._norm = RmsNorm(device, norm, eps, x_address=x_address, y_address=normed_address)

    def enqueue(self, unit_address: int, num_tokens: int) -> None:
        """Enqueue what `address` will hold, for the unit at `unit_address`."""
        if self._norm is not None:
            self._norm.enqueue(unit_address, num_tokens)

    def token_product(self, spec: TensorSpec, products: ProductPlan) -> TokenProduct:
        """The product of one token with `spec`, a matrix of the norm's unit."""
        if self._norm_weights is None or not self.is_fused:
            return _Plain(self._device, spec, products, x_address=self.address)
        product = FusedCpuProduct(self._device, spec, activations=products.activations, norm_eps=self._eps)
        return _Normed(product, spec, self._norm_weights, x_address=self._x_address)


class _Plain:
    """x W^T."""

    def __init__(
        self, device: OpenClDevice, spec: TensorSpec, products: ProductPlan, *, x_address: int
    ) -> None:
        self._matmul = products.matmul(device, spec, tokens_max=1)
        self._offset_bytes = spec.offset_bytes
        self._x_address = x_address

    def enqueue(self, unit_address: int, y_address: int) -> None:
        """See `TokenProduct.enqueue`."""
        self._matmul.enqueue(
            weights_address=unit_address + self._offset_bytes,
            x_address=self._x_address,
            y_address=y_address,
            num_tokens=1,
        )


class _Normed:
    """norm(x) W^T in one launch."""

    def __init__(
        self, product: FusedCpuProduct, spec: TensorSpec, norm: TensorSpec, *, x_address: int
    ) -> None:
        self._product = product
        self._offset_bytes = spec.offset_bytes
        self._norm_offset_bytes = norm.offset_bytes
        self._x_address = x_address

    def enqueue(self, unit_address: int, y_address: int) -> None:
        """See `TokenProduct.enqueue`."""
        self._product.enqueue(
            weights_address=unit_address + self._offset_bytes,
            x_address=self._x_address,
            other_address=unit_address + self._norm_offset_bytes,
            y_address=y_address,
        )
