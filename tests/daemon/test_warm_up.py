"""The warm-up: every shape of step once, over memory that is given back whatever happens."""

from types import SimpleNamespace

import numpy as np
import pytest

from mzd.daemon.warm_up import STEP_TOKENS, warm_up
from tests.actors.edges import FakeMemory

LAYERS = 3


class RecordingEngine:
    """Notes what is bound and run; fails at a step of `fails_at` tokens."""

    num_layers = LAYERS

    def __init__(self, fails_at=None):
        self.fails_at = fails_at
        self.bound = {}
        self.steps = []

    def bind_layer(self, layer, weights_address, chunk_addresses):
        self.bound[layer] = (weights_address, *chunk_addresses.tolist())

    def bind_head(self, address):
        self.bound["head"] = address

    def unbind_all(self):
        self.bound.clear()

    def begin(self, tokens, position, embeddings=None):
        assert tokens.dtype == np.int32
        if len(tokens) == self.fails_at:
            raise ZeroDivisionError
        self.steps.append([len(tokens)])

    def enqueue_layers(self):
        for layer in range(LAYERS):
            assert layer in self.bound
            self.steps[-1].append(layer)

    def enqueue_head(self, rows):
        self.steps[-1].append(rows)

    def mark(self):
        return None

    async def wait(self, event):
        """Done already."""


def parts_with(engine):
    layers = [SimpleNamespace(size_bytes=size) for size in (100, 300, 200)]
    index = SimpleNamespace(layers=layers, head=SimpleNamespace(size_bytes=50))
    units = SimpleNamespace(kv_sizes=SimpleNamespace(chunk_bytes=10))
    return SimpleNamespace(
        engine=engine, store=SimpleNamespace(index=index), units=units, memory=FakeMemory()
    )


async def test_every_shape_runs_whole_and_nothing_is_left():
    parts = parts_with(RecordingEngine())
    reserved = []
    reserve = parts.memory.reserve_run
    parts.memory.reserve_run = lambda sizes: reserved.append(list(sizes)) or reserve(sizes)
    await warm_up(parts)
    assert parts.engine.steps == [[count, 0, 1, 2, "last"] for count in STEP_TOKENS]
    assert not parts.engine.bound
    assert not parts.memory.out
    assert reserved == [[300, 50, 10, 10]]  # the largest layer once, the head, chunks for the longest step


async def test_a_step_that_fails_leaves_nothing_bound_or_leased():
    parts = parts_with(RecordingEngine(fails_at=8))
    with pytest.raises(ZeroDivisionError):
        await warm_up(parts)
    assert not parts.engine.bound
    assert not parts.memory.out
