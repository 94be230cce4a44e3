"""Owns what benches of eviction and restoration run on: a model and the length of its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mzd.benchmarks.models import REAL_MODEL, BenchModel, real_model, synthetic_model
from mzd.benchmarks.synthetic import GEOMETRIES
from mzd.formats.ggml_types import GgmlType

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


ENGINE_MODELS: Final = (REAL_MODEL, "qwen3-0.6b-f16", "qwen3-0.6b-q8_0")
"""What the bench `engine` runs on; of the synthetic ones geometry and type of the matrices."""


def engine_models(names: Sequence[str], report: Callable[[str], None]) -> list[BenchModel]:
    """The models of `names`, each of `ENGINE_MODELS`.

    Raises:
        MzdError: `not_found`, the real model is not installed; `weights_unavailable`, no room for the others.
    """
    return [_engine_model(name, report) for name in names]


def _engine_model(name: str, report: Callable[[str], None]) -> BenchModel:
    if name == REAL_MODEL:
        return real_model()
    geometry, _, type_name = name.rpartition("-")
    return synthetic_model(GEOMETRIES[geometry], report, GgmlType[type_name.upper()])
