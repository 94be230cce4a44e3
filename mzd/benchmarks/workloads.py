"""Owns what benches of eviction and restoration run on: a model and the length of its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mzd.benchmarks.models import REAL_MODEL, BenchModel, real_model, synthetic_model
from mzd.benchmarks.synthetic import GEOMETRIES

QUESTION_TOKENS: Final = 8
"""The question over the whole context, as in the paper."""

HALF: Final = 0.5
"""The level that the paper dissects: half of weights and KV remain in memory."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One model with one context, its KV drawn from a seed.

    Attributes:
        context_tokens: a multiple of 32, so that no codec group holds tokens of both context and question.
    """

    model: BenchModel
    context_tokens: int

    def fields(self) -> dict[str, str | int]:
        """The first columns of its rows."""
        return {"model": self.model.name, "context_tokens": self.context_tokens}


def workloads(quick: bool, report: Callable[[str], None]) -> tuple[Workload, ...]:
    """The real model at 8k (less room for the question) and, unless quick, a larger geometry at 16k.

    Raises:
        MzdError: `not_found`, the real model is not installed; `weights_unavailable`, no room for the other.
    """
    chosen = [Workload(real_model(REAL_MODEL), 8160)]
    if not quick:
        chosen.append(Workload(synthetic_model(GEOMETRIES["qwen3-0.6b"], report), 16_384))
    return tuple(chosen)
