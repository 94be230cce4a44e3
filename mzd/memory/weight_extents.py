"""Owns where the units that come from the weight store lie in its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mzd.formats.weight_store import UnitExtent
from mzd.policy.units import HeadUnit, WeightUnit


@dataclass(frozen=True, slots=True)
class WeightExtents:
    """The open weight store as the allocator sees it: one extent a unit, read with direct I/O.

    Attributes:
        fd: of the store; it stays open as long as this object is used.
        layers: in forward order.
        check: raises MzdError (`weights_unavailable`, `model_changed`) when the file is no longer what was
            opened; asked before every restore that reads weights.
    """

    fd: int
    layers: tuple[UnitExtent, ...]
    head: UnitExtent
    check: Callable[[], None]

    def extent(self, unit: WeightUnit | HeadUnit) -> UnitExtent:
        """Where a unit lies."""
        return self.head if isinstance(unit, HeadUnit) else self.layers[unit.layer]
