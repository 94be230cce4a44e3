"""Owns how an engine's matrix products are made: activations, launch shapes, memory that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mzd.device.autotune import autotune
from mzd.device.matmul import Activations, Matmul, WeightShape
from mzd.device.matmul_choice import Choice, ProductKey
from mzd.device.opencl import OpenClDevice
from mzd.formats.weight_store import StoreIndex, TensorSpec

EXACT_ROLES = frozenset({"attn_q", "attn_k", "attn_v", "token_embd", "output"})
"""Never rounded: every later token reads K and V, softmax magnifies what is in q and k, and logits that are
nearly equal would change places. Of SmolLM2-135M's greedy choices over two texts 2.6 % were others with all
activations rounded, 1.6 % without these; at one token the step took a tenth longer for it."""

Choices = Mapping[ProductKey, Choice]


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """See `Matmul` for each.

    Attributes:
        activations: of all but `EXACT_ROLES`.
        choices: launch shapes that were measured.
        rounded_address: where products on a GPU keep rounded tokens; one place, for they run in a row.
    """

    activations: Activations = "f32"
    choices: Choices | None = None
    rounded_address: int | None = None

    def exact(self) -> ProductPlan:
        """The same without rounding."""
        return replace(self, activations="f32")

    def matmul(self, device: OpenClDevice, spec: WeightShape, *, tokens_max: int) -> Matmul:
        """Make a product for one call site."""
        return Matmul(
            device,
            spec,
            tokens_max=tokens_max,
            activations=self.activations,
            choices=self.choices,
            rounded_address=self.rounded_address,
        )


def measured_choices(
    device: OpenClDevice, index: StoreIndex, *, tokens_max: int, activations: Activations, path: Path
) -> Choices:
    """Launch shapes for the products of a model; measured at the first start on a device, kept in `path`.

    Raises:
        OSError: the file cannot be written.
        MzdError: ``insufficient_memory``.
    """
    specs = [spec for unit in (*index.layers, index.head) for spec in unit.tensors if spec.rows > 1]
    exact = _shapes(spec for spec in specs if spec.role in EXACT_ROLES)
    others = _shapes(spec for spec in specs if spec.role not in EXACT_ROLES)
    return {
        **autotune(device, exact, tokens_max=tokens_max, activations="f32", path=path),
        **autotune(device, others, tokens_max=tokens_max, activations=activations, path=path),
    }


def _shapes(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """One of each shape: layers are alike."""
    return list({(spec.type, spec.rows, spec.cols): spec for spec in specs}.values())
