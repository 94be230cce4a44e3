"""Every architecture through both paths: its answers do not tell what was evicted meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from mzd.model.importer import import_gguf
from tests.paths.harness import Daemon, open_daemon
from tests.reference.golden import FIXTURES, golden_models

NAMES = ("llama", "qwen2", "qwen3", "exaone4", "exaone4hybrid", "gemma2", "gemma3")

PIECES = (3, 5, 8)
"""Tokens that a context is asked for at a time; each piece but the first begins with a restore."""


async def answers(daemon: Daemon, prompts: list[list[int]], evicted: float | None) -> list[list[int]]:
    """The greedy continuation of each prompt, the contexts in turns; they are dropped in the end.

    An answer ends with an end token, as `generate` does.

    Args:
        evicted: the share of all memory that goes after each piece of an answer; None: no eviction is asked.
    """
    said: list[list[int]] = [[] for _ in prompts]
    ended: set[int] = set()
    for turn, size in enumerate(PIECES):
        for i, prompt in enumerate(prompts):
            if i in ended:
                continue
            result = await daemon.generate(f"c{i}", [] if turn else prompt, size)
            said[i] += result["tokens"]
            ended |= {i} if result["finish_reason"] == "stop" else set()
            if evicted is not None:
                freed = await daemon.evict(evicted)
                assert (freed["freed_bytes"] > 0) == (evicted > 0)
                await daemon.settle()
    for i in range(len(prompts)):
        await daemon.call("drop", context=f"c{i}")
    return said


def check_golden(prompts: list[dict[str, Any]], said: list[list[int]]) -> None:
    """Equal to what another engine says, up to the first step that its margins make doubtful."""
    for prompt, tokens in zip(prompts, said, strict=True):
        expected = prompt["continuation"][: prompt["compare_steps"]]
        assert tokens
        assert tokens[: len(expected)] == expected[: len(tokens)]


@pytest.mark.parametrize("name", NAMES)
async def test_answers_are_those_of_a_model_that_was_never_evicted(device, name, tmp_path):
    """Prompts of two and of three chunks, and of many windows where layers have one."""
    import_gguf(FIXTURES / f"{name}-F16.gguf", tmp_path / "weights.mzw")
    golden = [prompt for prompt in golden_models()[f"{name}-F16"]["prompts"] if len(prompt["tokens"]) > 256]
    prompts = [prompt["tokens"] for prompt in golden]
    assert len(prompts) > 1
    async with open_daemon(device, tmp_path / "weights.mzw", tmp_path / "state") as daemon:
        kept = await answers(daemon, prompts, evicted=None)
        check_golden(golden, kept)
        for fraction in (0.0, 0.37, 1.0):
            assert await answers(daemon, prompts, fraction) == kept, f"{fraction:.0%} evicted"
