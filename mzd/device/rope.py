"""Owns the angles of rotary position embedding, computed on the host in double precision."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mzd.formats.model_config import RopeConfig


class RopeAngles:
    """Cosines and sines for consecutive positions.

    On the host because a device's float32 sine of a large angle may be anything, and because the few
    numbers of a step serve every head of every layer.
    """

    def __init__(self, rope: RopeConfig) -> None:
        exponents = np.arange(0, rope.dimensions, 2, dtype=np.float64) / rope.dimensions
        divisors = 1.0 if rope.freq_factors is None else np.array(rope.freq_factors, np.float64)
        self._frequencies: NDArray[np.float64] = rope.base**-exponents / divisors

    @property
    def num_pairs(self) -> int:
        """Pairs of channels that rotate, half of the rotating dimensions."""
        return len(self._frequencies)

    def write(self, out: NDArray[np.float32], position: int) -> None:
        """Fill `out`, (tokens, 2, num_pairs) float32, for `position` and on: cosines, then sines."""
        positions = np.arange(position, position + len(out), dtype=np.float64)
        angles = positions[:, None] * self._frequencies
        np.cos(angles, out=out[:, 0], casting="same_kind")
        np.sin(angles, out=out[:, 1], casting="same_kind")
