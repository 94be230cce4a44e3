"""Owns the answer to how much memory a model needs, before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mzd.formats.model_config import ModelConfig
from mzd.formats.weight_store import UnitExtent, UnitPlan

KILO_TOKENS = 1024
CONTEXT_LENGTHS = (2048, 8192, 32768)  # tokens; what people set, from a phone to a workstation


@dataclass(frozen=True, slots=True)
class TotalNeed:
    """Everything that one context of `context_tokens` tokens needs resident while it is answered."""

    context_tokens: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What units of a model take when all are resident, padding too; the program itself comes on top.

    Attributes:
        weights_bytes: all layers.
        head_bytes: embedding, output norm, and the output matrix where there is one.
        kv_bytes_per_1k_tokens: K and V, float16, of 1024 tokens in all layers.
        totals: by context length, shortest first; the last is the model's own where that is the shorter.
    """

    weights_bytes: int
    head_bytes: int
    kv_bytes_per_1k_tokens: int
    totals: tuple[TotalNeed, ...]

    def fields(self) -> dict[str, Any]:
        """As JSON shows it."""
        totals = [
            {"context_tokens": total.context_tokens, "total_bytes": total.total_bytes}
            for total in self.totals
        ]
        return {
            "weights_bytes": self.weights_bytes,
            "head_bytes": self.head_bytes,
            "kv_bytes_per_1k_tokens": self.kv_bytes_per_1k_tokens,
            "totals": totals,
        }


def memory_need(
    config: ModelConfig,
    layers: Sequence[UnitPlan | UnitExtent],
    head: UnitPlan | UnitExtent,
    *,
    chunk_tokens: int,
) -> MemoryNeed:
    """The memory that a model needs, stored or only planned.

    Args:
        layers, head: its units.
        chunk_tokens: tokens of a KV chunk; one that is begun is allocated whole.
    """
    weights_bytes = sum(layer.size_bytes for layer in layers)
    lengths = sorted({min(length, config.context_length) for length in CONTEXT_LENGTHS})
    totals = tuple(
        TotalNeed(length, weights_bytes + head.size_bytes + _kv_bytes(config, length, chunk_tokens))
        for length in lengths
    )
    return MemoryNeed(weights_bytes, head.size_bytes, _kv_bytes(config, KILO_TOKENS, chunk_tokens), totals)


def _kv_bytes(config: ModelConfig, tokens: int, chunk_tokens: int) -> int:
    num_chunks = -(-tokens // chunk_tokens)
    return num_chunks * config.num_layers * config.kv_chunk_bytes(chunk_tokens)
