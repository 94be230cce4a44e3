"""The restore path: restoration and prefill overlap at random moments, and nobody sees a unit too early."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.paths.faults import fresh_chunks_are_zero
from tests.paths.harness import open_daemon, poisoned_arena, slow_workers

ROUNDS = 200
DELAY_S = 0.002
CONTEXTS = ("a", "b")


class LogitsError(AssertionError):
    """A row of logits holds NaN, or is not the one that it should be."""


def random_tokens(rng, count):
    return [rng.randrange(5, 320) for _ in range(count)]


async def conversation(daemon, rounds, seed):
    """Two contexts of some 500 tokens, then `rounds` times: evict a random share, continue one of them."""
    rng = random.Random(seed)
    for context in CONTEXTS:
        await daemon.generate(context, random_tokens(rng, 460 + rng.randrange(80)), 1)
    for _ in range(rounds):
        await daemon.evict(rng.choice((rng.random(), 1.0)))
        await daemon.generate(rng.choice(CONTEXTS), random_tokens(rng, rng.choice((1, 3, 8))), 2)
        await daemon.settle()
    return daemon.engine.seen


def check_logits(found, expected):
    """Bit for bit the same rows, none with NaN."""
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not np.isfinite(one).all():
            raise LogitsError(f"step {i} read a unit that was not resident")
        if not np.array_equal(one, other):
            raise LogitsError(f"the logits of step {i} differ by up to {np.abs(one - other).max()}")


async def sequential(device, store, state, rounds, **config):
    """The logits of the same conversation where nothing overlaps and nothing is late."""
    async with open_daemon(device, store, state, overlap="mz_NO", **config) as daemon:
        return await conversation(daemon, rounds, seed=1)


async def overlapped(device, store, state, rounds, overlap="mz_ARP", **config):
    """The same conversation over poisoned memory, with every thread late by random times."""
    late = slow_workers(seed=rounds, delay_s=DELAY_S)
    with fresh_chunks_are_zero():
        async with open_daemon(
            device, store, state, memory=poisoned_arena, workers=late, overlap=overlap, **config
        ) as daemon:
            return await conversation(daemon, rounds, seed=1)


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_overlap_never_reads_what_is_not_there(device, long_store, tmp_path, codec):
    """Case 037: 100 times by each way back; int8 makes the same errors in both runs."""
    expected = await sequential(device, long_store, tmp_path / "1", ROUNDS // 2, codec=codec)
    found = await overlapped(device, long_store, tmp_path / "2", ROUNDS // 2, codec=codec)
    check_logits(found, expected)
