"""Owns the choice of the next token: from logits to one id, and to log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mzd.errors import MzdError

SEED_MAX: Final = 2**64 - 1
TEMPERATURE_MAX: Final = 1e6
"""Far beyond use; keeps the arithmetic finite."""

_SET_LOGITS: Final = 64
"""Logits of which only the largest is looked at first: so few that most sets hold none of the best."""

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose. Checked when made.

    Attributes:
        temperature: divides the logits; 0 chooses the largest.
        top_k: keep the k largest; 0 keeps all.
        top_p: keep the fewest most probable ones that have this probability together; 1 keeps all.
        min_p: keep those that are at least this many times as probable as the most probable; 0 keeps all.
        seed: unsigned 64-bit; None takes one from the system.

    Raises:
        MzdError: `invalid_params`; `data["parameter"]` is the name.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, TEMPERATURE_MAX)
        _require_number("top_p", self.top_p, 1.0)
        _require_number("min_p", self.min_p, 1.0)
        _require_integer("top_k", self.top_k, 2**31 - 1)
        if self.seed is not None:
            _require_integer("seed", self.seed, SEED_MAX)


class Sampler:
    """Chooses tokens one after the other. Params with a seed and the same logits give the same tokens.

    The order is that of llama.cpp's default chain: top-k, top-p, min-p, temperature. So temperature changes
    how likely the kept tokens are, not which are kept. Top-p counts in what top-k kept as the whole.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._bits = np.random.PCG64(params.seed)

    def sample(self, logits: Logits) -> int:
        """One token id.

        Args:
            logits: (vocab,) float32, left as they are; -inf excludes a token.

        Raises:
            MzdError: `internal`: a logit is NaN or +inf, or all are -inf. No token is drawn from those.
        """
        if self._params.temperature == 0:
            chosen = int(np.argmax(logits))  # the first of equal ones, or of NaN
            _require_finite(logits[chosen])
            return chosen
        ids = _largest(logits, self._params.top_k or len(logits))
        below_peak = logits[ids].astype(np.float64)
        below_peak -= below_peak[0]
        cumulative = self._weights(below_peak[: self._count_kept(below_peak)]).cumsum()
        drawn = cumulative.searchsorted(self._uniform() * cumulative[-1], side="right")
        last = cumulative.searchsorted(cumulative[-1])  # rounding must not reach the weightless ones behind
        return int(ids[min(drawn, last)])

    def logprob(self, logits: Logits, token_id: int) -> float:
        """The natural logarithm of the token's probability, from the raw logits: no filter, temperature 1."""
        return float(np.float64(logits[token_id]) - _log_sum_exp(logits))

    def top_logprobs(self, logits: Logits, n: int) -> list[tuple[int, float]]:
        """The `n` most probable ids with their `logprob`, descending, the lower id first among equals.

        Raises:
            MzdError: `internal`, as `sample`.
        """
        ids = _largest(logits, n)
        values = logits[ids].astype(np.float64) - _log_sum_exp(logits)
        return list(zip(ids.tolist(), values.tolist(), strict=True))

    def _count_kept(self, below_peak: NDArray[np.float64]) -> int:
        """How many pass the filters, of the most probable ones in descending order."""
        count = len(below_peak)
        odds = np.exp(below_peak)
        if self._params.top_p < 1:
            cumulative = odds.cumsum()
            count = int(cumulative.searchsorted(self._params.top_p * cumulative[-1])) + 1
        return min(count, int(np.count_nonzero(odds >= self._params.min_p)))

    def _weights(self, below_peak: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) float64, the first 1: how many times as likely as the peak each is, at the temperature."""
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf, as it should
            weights: NDArray[np.float64] = np.exp(below_peak / self._params.temperature)
        return weights

    def _uniform(self) -> float:
        """A number in [0, 1). Made from raw bits, which NumPy never changes, while `Generator` may."""
        return (int(self._bits.random_raw()) >> 11) * 2.0**-53


def _largest(logits: Logits, n: int) -> NDArray[np.intp]:
    """Ids of the `n` largest, descending, the lower id first among equals. Sorts no more than it must.

    Raises:
        MzdError: `internal`, as `Sampler.sample`.
    """
    peaks = _peaks(logits, n)
    _require_finite(peaks.max())  # NaN if any is
    if n <= 0:
        return np.empty(0, dtype=np.intp)
    if n < len(logits):
        least = np.partition(peaks, len(peaks) - n)[len(peaks) - n]
        ids = np.flatnonzero(logits >= least)
    else:
        ids = np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:n]]


def _peaks(logits: Logits, n: int) -> Logits:
    """The largest of each of more than `n` sets of logits; so `n` logits reach the `n`-th largest of these.

    A partition of all logits copies them, and took most of the time of choosing a token.
    """
    width = len(logits) // _SET_LOGITS
    if width <= max(n, _SET_LOGITS):
        return logits
    peaks: Logits = logits[: _SET_LOGITS * width].reshape(_SET_LOGITS, width).max(axis=0)
    rest = logits[_SET_LOGITS * width :]
    np.maximum(peaks[: len(rest)], rest, out=peaks[: len(rest)])
    return peaks


def _log_sum_exp(logits: NDArray[Any]) -> np.float64:
    """The logarithm of the sum of all `exp(logits)`, in float64."""
    peak = np.float64(logits.max())
    return np.float64(peak + np.log(np.exp(logits.astype(np.float64) - peak).sum()))


def _require_finite(peak: np.float32) -> None:
    if not np.isfinite(peak):
        found = "NaN" if np.isnan(peak) else f"{peak}"
        raise MzdError("internal", f"the model computed {found} as its largest logit", largest_logit=found)


def _require_number(name: str, value: Any, largest: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= largest:
        raise MzdError("invalid_params", f"{name} is a number from 0 to {largest:g}", parameter=name)


def _require_integer(name: str, value: Any, largest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise MzdError("invalid_params", f"{name} is an integer from 0 to {largest}", parameter=name)
