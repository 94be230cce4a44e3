"""Owns how codecs take addresses: any sequence of integers, or an array that needs no copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Addresses: TypeAlias = Sequence[int] | NDArray[np.uint64]


def address_array(addresses: Addresses) -> NDArray[np.uint64]:
    """(n,) uint64, contiguous; the argument itself if it is that already."""
    return np.ascontiguousarray(addresses, dtype=np.uint64)
