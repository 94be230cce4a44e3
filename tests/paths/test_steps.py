"""Evict by one percent more, again and again: the account is the kernel's, and every way back is whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.paths.conftest import imported
from tests.paths.harness import open_daemon
from tests.paths.synthetic import Shape

PERCENT = range(1, 101)
ACCOUNT_ERROR = 0.03
"""Of the whole model memory; the contract allows as much of all that the daemon holds."""


def some_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(5, 320, count).tolist()


@pytest.fixture(scope="module")
def deep_store(tmp_path_factory):
    """Twelve layers of 2 MiB, chunks of 512 KiB: one percent is less than a layer."""
    shape = Shape(num_layers=12, hidden=256, ffn=640, heads=8, kv_heads=8, head_dim=64)
    return imported(tmp_path_factory.mktemp("deep"), shape, seed=13)


class Account:
    """The daemon's account beside the kernel's, as changes since the start.

    Make it after an eviction of nothing: each one gives the C library's free heap back, which is nobody's.
    """

    def __init__(self, daemon):
        self._daemon = daemon
        self._start = self._figures()
        self._allowed_bytes = ACCOUNT_ERROR * daemon.reporter.full_bytes()

    def _figures(self):
        ledger_bytes = self._daemon.reporter.ledger().snapshot().total_bytes
        return np.array([ledger_bytes, self._daemon.resident_set_bytes()])

    def check(self, when):
        """Raise AssertionError where they are further apart than is allowed."""
        claimed, found = (self._figures() - self._start).tolist()
        assert abs(claimed - found) <= self._allowed_bytes, f"{when}: {claimed} in the books, {found} found"


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_each_percent_leaves_the_resident_set(device, deep_store, tmp_path, codec):
    """From full to empty without a way back between."""
    async with open_daemon(device, deep_store, tmp_path, codec=codec) as daemon:
        await daemon.generate("c", some_tokens(900))
        await daemon.settle()
        account = Account(daemon)
        freed_bytes = 0
        for percent in PERCENT:
            full_bytes = daemon.reporter.full_bytes()
            wanted_bytes = percent * full_bytes // 100 - freed_bytes
            result = await daemon.evict(bytes=max(0, wanted_bytes))
            freed_bytes += result["freed_bytes"]
            assert freed_bytes >= percent * full_bytes // 100 or result["exhausted"]
            account.check(f"{percent} %")
        await daemon.settle()
        assert daemon.reporter.resident_bytes() == 0


async def answers(daemon, evict):
    """A token after each percent; the logits that chose them."""
    await daemon.generate("c", some_tokens(600))
    for percent in PERCENT:
        await evict(percent)
        await daemon.generate("c", some_tokens(2, seed=percent), 1)
    return daemon.engine.seen


async def test_the_way_back_from_each_percent_gives_the_same_logits(device, deep_store, tmp_path):
    """Bit for bit those of a run that was never evicted; weights and the account are whole each time."""

    async def keep(percent):
        pass

    async with open_daemon(device, deep_store, tmp_path / "kept") as daemon:
        expected = await answers(daemon, keep)

    async with open_daemon(device, deep_store, tmp_path / "evicted") as daemon:

        async def evict(percent):
            await daemon.settle()
            account = Account(daemon)
            await daemon.evict(percent / 100)
            account.check(f"after {percent} %")

        found = await answers(daemon, evict)
        await daemon.settle()
    assert len(found) == len(expected) == len(PERCENT) + 1
    for percent, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert np.array_equal(one, other), f"after {percent} %"


async def test_int8_changes_a_chunk_once_at_whatever_percent(device, deep_store, tmp_path):
    """A chunk's first way out may change it; from then on none does, and weights never change."""
    order = list(PERCENT)
    random.Random(4).shuffle(order)
    async with open_daemon(device, deep_store, tmp_path, codec="int8") as daemon:
        await daemon.generate("c", some_tokens(600))
        weights, sums, changed = daemon.weight_sums(), daemon.chunk_sums("c"), set()
        for percent in order:
            await daemon.evict(percent / 100)
            await daemon.call("restore", context="c")
            before, sums = sums, daemon.chunk_sums("c")
            now = {place for place in sums if sums[place] != before[place]}
            assert not now & changed, f"{percent} %: changed again"
            changed |= now
            assert daemon.weight_sums() == weights
        await daemon.settle()
        assert changed == set(sums)
