"""Owns the names of units, the kinds of integer and the sizes that every part agrees on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType

LayerIndex = NewType("LayerIndex", int)
ChunkIndex = NewType("ChunkIndex", int)
SizeBytes = NewType("SizeBytes", int)

CHUNK_TOKENS: Final = 256
"""Tokens of one KV chunk. Storage reads saturate at about 512 KiB (paper, 4.3)."""

PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, order=True)
class WeightUnit:
    """All weights of one layer."""

    layer: LayerIndex


@dataclass(frozen=True, slots=True, order=True)
class HeadUnit:
    """Token embedding, output norm and output matrix."""


@dataclass(frozen=True, slots=True, order=True)
class KvUnit:
    """K and V of one layer for the tokens ``[chunk * 256, chunk * 256 + 256)`` of one context."""

    context: str
    layer: LayerIndex
    chunk: ChunkIndex


UnitId = WeightUnit | HeadUnit | KvUnit
