"""Owns how repeated measurements become one figure: interleaved rounds, medians, spread, ratios."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

ROUNDS = 5
ROUNDS_QUICK = 3

SETTLE_S = 0.03
"""Threads of one contestant spin for some milliseconds after their work; the next must not pay for it."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity, measured once a round.

    Raises:
        ValueError: no measurement.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a series needs at least one measurement")

    @property
    def median(self) -> float:
        """The figure that is quoted."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Largest less smallest: on a shared machine the tails are the story."""
        return max(self.values) - min(self.values)

    def scaled(self, factor: float) -> Series:
        """The same measurements in another unit."""
        return Series(tuple(value * factor for value in self.values))

    def fields(self, name: str, unit: str = "s") -> dict[str, float]:
        """Median and spread as columns of a row, e.g. `ttft_s` and `ttft_spread_s`."""
        return {f"{name}_{unit}": self.median, f"{name}_spread_{unit}": self.spread}


def ratio(numerator: Series, denominator: Series) -> float:
    """How many times `numerator` is `denominator`, by medians: 2.0 where the latter takes half the time.

    Raises:
        ValueError: the denominator is zero.
    """
    if denominator.median == 0:
        raise ValueError("no ratio to a quantity of zero")
    return numerator.median / denominator.median


def rounds(quick: bool) -> int:
    """Rounds of a measurement."""
    return ROUNDS_QUICK if quick else ROUNDS


async def interleave(
    contestants: Mapping[K, Callable[[], Awaitable[float]]], num_rounds: int, *, warm_up: bool = True
) -> dict[K, Series]:
    """Measure contestants in turn, A B A B, so that what slows the machine down slows all of them.

    Args:
        contestants: each call measures once and returns the quantity.
        warm_up: run each once before, without counting it.
    """
    if warm_up:
        for measure in contestants.values():
            await measure()
    values: dict[K, list[float]] = {key: [] for key in contestants}
    for _ in range(num_rounds):
        for key, measure in contestants.items():
            await trio.sleep(SETTLE_S)
            values[key].append(await measure())
    return {key: Series(tuple(found)) for key, found in values.items()}


def series_by(keys: Sequence[str], measured: Iterable[Mapping[str, float]]) -> dict[str, Series]:
    """Turn rounds of several quantities each into a series for each of `keys`."""
    found = list(measured)
    return {key: Series(tuple(quantities[key] for quantities in found)) for key in keys}
