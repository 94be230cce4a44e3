"""Every kind of memory that a device may have: the same words, whatever went and came back."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from mzd.daemon.config import SwapConfig
from mzd.device.engine import Engine
from mzd.device.opencl import OpenClDevice
from mzd.device.selection import MEMORY_KINDS
from mzd.device.self_test import self_test
from mzd.memory.arena import Arena
from mzd.memory.device_units import MappedUnits, StagedUnits
from mzd.model.weight_store import WeightStore
from tests.paths.harness import open_daemon
from tests.paths.strict_memory import StrictAllocator
from tests.paths.test_generation_path import in_turns

BACKENDS = {"fine_svm": Arena, "coarse_svm": MappedUnits, "staged": StagedUnits, "buffers": MappedUnits}


@pytest.fixture(scope="module", params=MEMORY_KINDS)
def kind_device(request, fixture_store):
    """Proven first, as a daemon does: its kernels are then compiled, and no request waits for that."""
    device = OpenClDevice.open(memory_kind=request.param)
    with WeightStore.open(fixture_store) as store:
        self_test(device, store.index, activations="f32")
    yield device
    device.close()


async def said_with_evictions(daemon, golden, fraction):
    async def evict():
        await daemon.evict(fraction)
        await daemon.settle()

    return await in_turns(daemon, golden, evict)


@pytest.mark.parametrize(
    ("codec", "fraction", "storage"), [("none", 0.37, True), ("none", 1, True), ("int8", 1, False)]
)
async def test_greedy_tokens_equal_the_references(
    kind_device, fixture_store, golden, tmp_path, codec, fraction, storage
):
    swap = {"swap": SwapConfig(storage=storage)}
    async with open_daemon(kind_device, fixture_store, tmp_path, codec=codec, **swap) as daemon:
        assert isinstance(daemon.opened.parts.memory, BACKENDS[kind_device.memory_kind])
        said = await said_with_evictions(daemon, golden, fraction)
        await daemon.evict()
        await daemon.settle()
        assert daemon.opened.parts.memory.statistics().populated_bytes == 0
    if codec == "none":
        assert said == [expected for _, expected in golden]
    else:
        assert [len(tokens) for tokens in said] == [len(expected) for _, expected in golden]


async def test_what_one_kind_of_memory_wrote_another_reads(kind_device, device, long_store, tmp_path):
    prompt = np.random.default_rng(3).integers(5, 320, 600).tolist()
    async with open_daemon(device, long_store, tmp_path / "1") as daemon:
        alone = await daemon.generate("c", prompt, 8)
    async with open_daemon(kind_device, long_store, tmp_path / "2") as daemon:
        await daemon.generate("c", prompt)
        await daemon.evict()
    async with open_daemon(device, long_store, tmp_path / "2") as daemon:
        again = await daemon.generate("c", [], 8)
    assert again["tokens"] == alone["tokens"]


@contextlib.contextmanager
def strict(device, monkeypatch):
    """A maker of memory that shows the device only what went through maps."""
    allocator = StrictAllocator(device.allocations)
    bind_layer, bind_head = Engine.bind_layer, Engine.bind_head

    def strict_bind_layer(engine, layer, weights_address, chunk_addresses):
        allocator.hand_over([weights_address, *chunk_addresses.tolist()])
        bind_layer(engine, layer, weights_address, chunk_addresses)

    def strict_bind_head(engine, address):
        allocator.hand_over([address])
        bind_head(engine, address)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "bind_layer", strict_bind_layer)
        patch.setattr(Engine, "bind_head", strict_bind_head)
        yield lambda reserve: MappedUnits(allocator)


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_every_write_of_the_host_goes_through_a_map(
    device, fixture_store, golden, tmp_path, monkeypatch, codec
):
    with strict(device, monkeypatch) as memory:
        async with open_daemon(device, fixture_store, tmp_path, memory=memory, codec=codec) as daemon:
            said = await said_with_evictions(daemon, golden, 1)
    async with open_daemon(device, fixture_store, tmp_path / "2", codec=codec) as daemon:
        assert said == await said_with_evictions(daemon, golden, 1)


async def test_a_map_that_is_missing_shows(device, fixture_store, golden, tmp_path, monkeypatch):
    """A planted fault: the host writes straight to the device's address, which works on PoCL alone."""

    def straight(units, addresses, sizes):
        return contextlib.nullcontext(addresses)

    monkeypatch.setattr(MappedUnits, "writing", straight)
    with strict(device, monkeypatch) as memory:
        async with open_daemon(device, fixture_store, tmp_path, memory=memory) as daemon:
            said = await said_with_evictions(daemon, golden, 1)
    assert said != [expected for _, expected in golden]
