"""The warm-up: every shape of step once, over memory that is given back whatever happens."""

from types import SimpleNamespace

import numpy as np
import pytest

from mzd.daemon.warm_up import LONGER_STEP_TOKENS, distinct_layers, warm_up
from mzd.formats.ggml_types import GgmlType
from mzd.formats.weight_store import TensorSpec
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
            self.enqueue_layer(layer)

    def enqueue_layer(self, layer):
        assert layer in self.bound
        self.steps[-1].append(layer)

    def enqueue_head(self, rows):
        self.steps[-1].append(rows)

    def mark(self):
        return None

    async def wait(self, event):
        """Done already."""


def unit(size_bytes, *types):
    tensors = [TensorSpec(f"matrix{i}", type, 8, 32, 0, 64) for i, type in enumerate(types)]
    return SimpleNamespace(size_bytes=size_bytes, tensors=tensors)


def index_of(*layers, configs=None):
    """A store's index; `configs` says what else tells the layers apart."""
    config = SimpleNamespace(layers=configs or ["same"] * len(layers))
    return SimpleNamespace(layers=layers, config=config, head=SimpleNamespace(size_bytes=50))


def parts_with(engine, index=None):
    index = index or index_of(*(unit(size, GgmlType.F16) for size in (100, 300, 200)))
    units = SimpleNamespace(kv_sizes=SimpleNamespace(chunk_bytes=10))
    return SimpleNamespace(
        engine=engine, store=SimpleNamespace(index=index), units=units, memory=FakeMemory()
    )


async def test_every_shape_runs_and_nothing_is_left():
    parts = parts_with(RecordingEngine())
    reserved = []
    reserve = parts.memory.reserve_run
    parts.memory.reserve_run = lambda sizes: reserved.append(list(sizes)) or reserve(sizes)
    await warm_up(parts)
    assert parts.engine.steps == [[1, 0, 1, 2, "last"], *([count, 0] for count in LONGER_STEP_TOKENS)]
    assert not parts.engine.bound
    assert not parts.memory.out
    assert reserved == [[300, 50, 10, 10]]  # the largest layer once, the head, chunks for the longest step


async def test_longer_steps_reach_the_last_layer_that_is_new():
    layers = [unit(100, type) for type in (GgmlType.F16, GgmlType.Q8_0, GgmlType.F16)]
    parts = parts_with(RecordingEngine(), index_of(*layers))
    await warm_up(parts)
    assert parts.engine.steps[1:] == [[count, 0, 1] for count in LONGER_STEP_TOKENS]


def test_layers_differ_by_their_matrices_and_by_what_the_model_says():
    same = [unit(100, GgmlType.F16) for _ in range(4)]
    assert distinct_layers(index_of(*same)) == 1
    assert distinct_layers(index_of(*same, configs=["window", "window", "global", "window"])) == 3
    assert distinct_layers(index_of(*same[:3], unit(100, GgmlType.F16, GgmlType.F16))) == 4


async def test_a_step_that_fails_leaves_nothing_bound_or_leased():
    parts = parts_with(RecordingEngine(fails_at=8))
    with pytest.raises(ZeroDivisionError):
        await warm_up(parts)
    assert not parts.engine.bound
    assert not parts.memory.out
