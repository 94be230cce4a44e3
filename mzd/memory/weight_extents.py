"""Owns where the units that come from the weight store lie in its file."""

from __future__ import annotations

from dataclasses import dataclass

from mzd.formats.weight_store import UnitExtent
from mzd.policy.units import HeadUnit, WeightUnit


@dataclass(frozen=True, slots=True)
class WeightExtents:
    """The open weight store as the allocator sees it: one extent a unit, read with direct I/O.

    Attributes:
        fd: of the store; it stays open as long as this object is used.
        layers: in forward order.
    """

    fd: int
    layers: tuple[UnitExtent, ...]
    head: UnitExtent

    def extent(self, unit: WeightUnit | HeadUnit) -> UnitExtent:
        """Where a unit lies."""
        return self.head if isinstance(unit, HeadUnit) else self.layers[unit.layer]
