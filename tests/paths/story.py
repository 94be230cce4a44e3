"""Owns a story: a context whose continuation is known beforehand, so that any interruption can be judged."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from mzd.errors import MzdError
from tests.paths.harness import Daemon, open_daemon

ANSWER_TOKENS = 5

CLEAR_MARGIN = 0.1
"""Between the two best logits of a story's steps: what steps of another shape, or int8, change is less."""

SEEDS_MAX = 100


class Story:
    """A prompt, a question and the answer. However far a context got in it, it goes on right from there."""

    def __init__(self, prompt: list[int], question: list[int], answer: list[int]) -> None:
        self.prompt, self.question, self.answer = prompt, question, answer
        self._all = [*prompt, *question, *answer]

    async def begin(self, daemon: Daemon) -> None:
        """A new context `c` that knows the prompt."""
        with contextlib.suppress(MzdError):
            await daemon.call("drop", context="c")
        await daemon.generate("c", self.prompt)

    async def ask(self, daemon: Daemon, **params: Any) -> dict[str, Any]:
        """The question, and the first two tokens of the answer."""
        return await daemon.generate("c", self.question, 2, **params)

    async def check_goes_on(self, daemon: Daemon) -> dict[str, int]:
        """The context is there, its tokens begin the story, and what follows is the rest of it; the usage."""
        await daemon.settle()
        known = next(list(c.tokens) for c in daemon.conversations if c.name == "c")
        assert known == self._all[: len(known)]
        given = self.question if len(known) <= len(self.prompt) else []
        result = await daemon.generate("c", given, 2)
        start = len(known) + len(given)
        assert result["tokens"] == self._all[start : start + 2]
        await daemon.settle()
        return result["usage"]


async def find_story(device: Any, store: Any, state: Any, prompt_tokens: int) -> Story:
    """The first one with clear margins in which int8 and the exact codec give the same answer.

    Raises:
        AssertionError: no seed gives one.
    """
    async with (
        open_daemon(device, store, state / "none", codec="none") as exact_daemon,
        open_daemon(device, store, state / "int8", codec="int8") as lossy_daemon,
    ):
        for seed in range(SEEDS_MAX):
            exact, exact_margin = await _told(exact_daemon, seed, prompt_tokens)
            lossy, lossy_margin = await _told(lossy_daemon, seed, prompt_tokens)
            if exact.answer == lossy.answer and min(exact_margin, lossy_margin) > CLEAR_MARGIN:
                return exact
    raise AssertionError("no seed gives a story with clear margins")


async def _told(daemon: Daemon, seed: int, prompt_tokens: int) -> tuple[Story, float]:
    """The story of a seed, and the smallest margin of its answer's steps; 0 where it ends early."""
    prompt, question = _some_tokens(prompt_tokens, seed), _some_tokens(3, seed + 1000)
    await daemon.generate("s", prompt)
    await daemon.evict()
    result = await daemon.generate("s", question, ANSWER_TOKENS, logprobs=2)
    await daemon.call("drop", context="s")
    tops = [step["top"] for step in result["logprobs"]]
    margin = min(first["logprob"] - second["logprob"] for first, second in tops)
    return Story(prompt, question, result["tokens"]), margin if len(tops) == ANSWER_TOKENS else 0.0


def _some_tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, count).tolist()
