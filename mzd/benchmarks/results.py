"""Owns the form of a result: what stands at its top level, and which summary keys a bench has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mzd.benchmarks.environment import commit_name, machine_name, today

Row = Mapping[str, str | int | float | bool | None]
"""None: not measured here, as `notes` or the documentation says."""

SummaryValue = float | Mapping[str, Mapping[str, float]]
"""A figure, or figures by name."""

SUMMARY_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "breakdown": ("ratio_allocate", "ratio_reload", "ratio_prefill"),
    "engine": ("ratio_prompt512", "ratio_short8", "ratio_decode", "models"),
    "evict": ("first_byte_s", "all_bytes_s_per_gb", "resident_drop_over_freed"),
    "kernels": ("kernels",),
    "order": ("ratio_forward_out_over_backward_out", "ratio_random_out_over_backward_out"),
    "overlap": ("ratio_no_over_arp", "ratio_no_over_ar", "ratio_no_over_rp", "best_ratio", "overlap_of_best"),
    "swap": ("ratio_sequential_over_parallel", "swap_of_best", "path_imbalance"),
}
"""By bench; scripts rely on them. A key that could not be measured is left out, and `notes` says why."""


_LOWER_IS_BETTER: Final = frozenset(
    {"path_imbalance", "first_byte_s", "all_bytes_s_per_gb", "over_read", "over_llama_cpp"}
)


def worst(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each key the least flattering value."""
    keys = dict.fromkeys(key for summary in summaries for key in summary)
    return {
        key: (max if key in _LOWER_IS_BETTER else min)(s[key] for s in summaries if key in s) for key in keys
    }


class ResultError(ValueError):
    """A bench has produced a result that scripts could not read."""


@dataclass(slots=True)
class BenchResult:
    """What one bench has measured.

    Attributes:
        synthetic: weights or KV came from a seed.
        cold: the page cache was dropped before.
        rows: one a measurement, all with the same keys.
        summary: the figures that are quoted.
        notes: what a reader must know: what was left out, and why.
    """

    bench: str
    device: str
    driver: str
    quick: bool
    synthetic: bool
    cold: bool
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, SummaryValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_map(self) -> dict[str, Any]:
        """The JSON of the result.

        Raises:
            ResultError: rows of different columns, a summary key that the bench does not have, or one that
                is missing without a note.
        """
        _check_rows(self.rows)
        self._check_summary()
        return {
            "bench": self.bench,
            "date": today(),
            "machine": machine_name(),
            "device": self.device,
            "driver": self.driver,
            "commit": commit_name(),
            "quick": self.quick,
            "synthetic": self.synthetic,
            "cold": self.cold,
            **self.summary,
            "notes": list(self.notes),
            "rows": [dict(row) for row in self.rows],
        }

    def _check_summary(self) -> None:
        known = SUMMARY_KEYS[self.bench]
        unknown = sorted(set(self.summary) - set(known))
        if unknown:
            raise ResultError(f"the bench {self.bench} has no key {unknown[0]!r}")
        missing = [key for key in known if key not in self.summary]
        if missing and not self.notes:
            raise ResultError(f"the bench {self.bench} lacks {missing[0]!r} and says nothing about it")


def _check_rows(rows: Sequence[Row]) -> None:
    if not rows:
        raise ResultError("a result needs rows")
    for row in rows:
        if list(row) != list(rows[0]):
            raise ResultError(f"rows of different columns: {sorted(set(row) ^ set(rows[0]))}")
