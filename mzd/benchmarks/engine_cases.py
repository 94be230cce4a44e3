"""Owns what the bench `engine` times: its cases, what a system must offer, and one timed run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mzd.benchmarks.results import Row
from mzd.benchmarks.statistics import Series

Tokens = NDArray[np.int32]
Logits = NDArray[np.float32]

TOKENS_SEED: Final = 20260
DECODE_STEPS: Final = 32
DECODE_STEPS_QUICK: Final = 16


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: `steps` steps of `step_tokens` tokens each, over a context of `context_tokens`."""

    kind: str
    context_tokens: int
    step_tokens: int
    steps: int = 1

    @property
    def end_tokens(self) -> int:
        """Tokens of the context after it."""
        return self.context_tokens + self.step_tokens * self.steps


def engine_cases(quick: bool, context_length: int) -> tuple[Case, ...]:
    """The cases that fit into the model, shortest context first. Quick: not 8k, which is slow to fill."""
    steps = DECODE_STEPS_QUICK if quick else DECODE_STEPS
    cases = [
        Case("prompt", 0, 512),
        Case("decode", 512, 1, steps),
        Case("short", 2048, 8),
        Case("decode", 2048, 1, steps),
    ]
    if not quick:
        cases.append(Case("short", 8160, 8))
    return tuple(case for case in cases if case.end_tokens <= context_length)


class Contestant(Protocol):
    """One system; each method computes on all of its threads before it returns."""

    @property
    def name(self) -> str:
        """In rows."""

    async def fill(self, tokens: Tokens, start: int = 0) -> None:
        """Make `tokens` the context; the first `start` of them are there already."""

    async def answer(self, tokens: Tokens, position: int) -> int:
        """Compute `tokens` at `position` of the context; the greedy next id."""

    def logits(self) -> Logits:
        """(vocab,) float32 of the last answer; valid until the next one."""


def random_tokens(num_tokens: int, vocab_size: int) -> Tokens:
    """(num_tokens,) int32 ids by a seed: speed does not depend on which. Fewer are the first of more."""
    return np.random.default_rng(TOKENS_SEED).integers(0, vocab_size, num_tokens, dtype=np.int32)


async def greedy(system: Contestant, prompt: Tokens, num_tokens: int) -> list[int]:
    """The likeliest continuation of `prompt`."""
    tokens = [await system.answer(prompt, 0)]
    while len(tokens) < num_tokens:
        tokens.append(await system.answer(np.array(tokens[-1:], np.int32), len(prompt) + len(tokens) - 1))
    return tokens


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))


def logits_distance(ours: Logits, theirs: Logits) -> float:
    """Root mean square of the difference of two (vocab,) logits, over the spread of `theirs`.

    What both have in common with each of their logits is left out: probabilities do not depend on it.
    """
    difference = ours.astype(np.float64) - theirs
    return float(difference.std() / theirs.std(dtype=np.float64))


async def timed(system: Contestant, case: Case, tokens: Tokens) -> float:
    """Seconds of one run of a case; a step after the first takes the token that the one before it chose."""
    start_s = time.perf_counter()
    part = tokens
    for step in range(case.steps):
        chosen = await system.answer(part, case.context_tokens + step * case.step_tokens)
        if case.step_tokens == 1:
            part = np.array([chosen], np.int32)
    return time.perf_counter() - start_s


def case_row(model: str, case: Case, name: str, series: Series) -> Row:
    """One line of the table."""
    return {
        "model": model,
        "case": case.kind,
        "context_tokens": case.context_tokens,
        "new_tokens": case.step_tokens * case.steps,
        "system": name,
        **series.fields("time"),
        "tokens_per_s": case.step_tokens * case.steps / series.median,
        "rounds": len(series.values),
    }
