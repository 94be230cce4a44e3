"""Rows of launches, replayed or not: the driver must see the same, whatever changes in between."""

from __future__ import annotations

import ctypes
import random
from ctypes import POINTER, c_int32, c_size_t, c_uint32, c_void_p
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.device import engine as engine_module
from mzd.device import head_graph as head_graph_module
from mzd.device import kernel as kernel_module
from mzd.device import launch_queue as launch_queue_module
from mzd.device.kernel import BoundKernel
from mzd.device.launch_queue import LaunchQueue
from mzd.device.places import BufferMap
from mzd.device.replay import Replay
from mzd.errors import MzdError
from tests.reference.golden import FIXTURES
from tests.reference.loaded_model import LoadedModel
from tests.reference.model import pack_units

QUEUE = 7
NUM_KERNELS = 4
NUM_ARGUMENTS = 9
NUM_BUFFERS = 3

Enqueue = ctypes.CFUNCTYPE(
    c_int32, c_void_p, c_void_p, c_uint32, *[POINTER(c_size_t)] * 3, c_uint32, c_void_p, c_void_p
)


class Driver:
    """Kernels as numbers; `launched` holds each launch with the arguments that its kernel had.

    A launch is refused where `refusals_in` counts down to zero.
    """

    def __init__(self):
        self.arguments = {}
        self.pointers = {}
        self.launched = []
        self.refusals_in = 0
        self.clEnqueueNDRangeKernel = Enqueue(self._enqueue)

    def clSetKernelArg(self, handle, index, size, value):
        self.arguments[handle, index] = size if value is None else value._obj.value
        return 0

    def clSetKernelArgSVMPointer(self, handle, index, address):
        self.arguments[handle, index] = address
        return 0

    def clSetKernelExecInfo(self, handle, name, size, address):
        self.pointers[handle] = address
        return 0

    def _enqueue(self, queue, handle, dimensions, offset, global_size, local_size, *events):
        self.refusals_in -= 1
        if self.refusals_in == 0:
            return -5
        arguments = sorted((key[1], value) for key, value in self.arguments.items() if key[0] == handle)
        local = local_size[:dimensions] if local_size else None
        self.launched.append((handle, global_size[:dimensions], local, arguments, self.pointers.get(handle)))
        return 0


class World:
    """Four kernels that two rows share, over SVM or buffers; `replays` False enqueues every row anew."""

    def __init__(self, monkeypatch, *, with_buffers, replays):
        self.driver = Driver()
        for module in (kernel_module, launch_queue_module):
            monkeypatch.setattr(module, "libopencl", lambda: self.driver)
        self.buffers = BufferMap() if with_buffers else None
        self.num_buffers = 0
        self.addresses = [self.add_buffer(number) for number in range(NUM_BUFFERS)]
        self.pointers = np.zeros(2, np.uint64)
        self.queue = LaunchQueue(QUEUE, self.buffers)
        self.kernels = [
            BoundKernel(
                SimpleNamespace(handle=1 + i, num_args=NUM_ARGUMENTS, name=f"kernel{i}"),
                self.queue,
                (lambda: self.pointers) if i == 1 else None,
            )
            for i in range(NUM_KERNELS)
        ]
        self.replays = replays
        self.rows = [Replay(self.queue), Replay(self.queue)]
        self.refused = []

    def add_buffer(self, number):
        """A buffer of another handle each time at an address of its number's."""
        address = 1000 * (number + 1)
        self.num_buffers += 1
        if self.buffers is not None:
            self.buffers.add(address, 1000, 50 + self.num_buffers)
        return address

    def enqueue_row(self, number, tokens, place):
        """As a layer does: arguments by the number of tokens and by what is bound, sizes by the tokens."""
        first, second, third = self.kernels[number], self.kernels[1], self.kernels[2 + number % 2]
        first.set_address(0, self.addresses[place])
        first.set_int(1, tokens)
        first.enqueue((tokens,), (1,))
        second.set_float(1, 0.5 * tokens)
        second.set_address(2, self.addresses[0] + 8 * tokens)
        second.enqueue((tokens, 2), None)
        third.set_local(3, 64)
        third.enqueue((1, 2, tokens), (1, 1, 1))

    def run(self, number, tokens, place):
        """A row, whose key tells of the tokens only: what is bound is for `bind` to tell."""
        if not self.replays:
            self.rows[number].forget()
        try:
            self.rows[number].run(tokens, lambda: self.enqueue_row(number, tokens, place))
        except MzdError as error:
            self.refused.append(error.code)

    def change(self, what, number):
        """What goes on between two rows."""
        match what:
            case "argument":
                self.kernels[number].set_int(4, self.num_buffers + number)
                self.num_buffers += 1
            case "pointers":
                self.pointers = np.zeros(2, np.uint64)
                self.kept = [*getattr(self, "kept", []), self.pointers]
            case "buffer" if self.buffers is not None:
                self.buffers.remove(self.addresses[number % NUM_BUFFERS])
                self.add_buffer(number % NUM_BUFFERS)
            case "refusal":
                self.driver.refusals_in = 1 + number


def history(monkeypatch, steps, **kind):
    """What the driver of such a world sees over `steps`; pointer lists by the order of their coming."""
    world = World(monkeypatch, **kind)
    places = [0, 0]
    for what, number, tokens in steps:
        match what:
            case "run":
                world.run(number % 2, tokens, places[number % 2])
            case "bind":
                places[number % 2] = number % NUM_BUFFERS
                world.rows[number % 2].forget()
            case _:
                world.change(what, number)
    lists = {}
    launched = [
        (*launch, lists.setdefault(pointers, len(lists))) for *launch, pointers in world.driver.launched
    ]
    return launched, world.refused


step = st.tuples(
    st.sampled_from(["run", "run", "run", "run", "bind", "argument", "pointers", "buffer", "refusal"]),
    st.integers(0, NUM_KERNELS - 1),
    st.sampled_from([1, 1, 1, 8]),
)


@given(steps=st.lists(step, max_size=40), with_buffers=st.booleans())
def test_the_driver_sees_the_same_with_and_without_replay(steps, with_buffers):
    with pytest.MonkeyPatch.context() as monkeypatch:
        kinds = [{"with_buffers": with_buffers, "replays": replays} for replays in (False, True)]
        without, with_replay = (history(monkeypatch, steps, **kind) for kind in kinds)
    assert with_replay == without


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch, with_buffers=True, replays=True)


def count_anew(world, monkeypatch):
    """Rows that are enqueued anew from here on."""
    anew = []
    enqueue = world.enqueue_row
    monkeypatch.setattr(world, "enqueue_row", lambda *row: anew.append(row[0]) or enqueue(*row))
    return anew


def test_a_row_that_repeats_is_enqueued_in_one_call(world, monkeypatch):
    anew = count_anew(world, monkeypatch)
    for _ in range(5):
        world.run(0, 1, 0)
    assert anew == [0]
    assert len(world.driver.launched) == 15


@pytest.mark.parametrize("what", ["argument", "buffer", "refusal"])
def test_a_row_is_enqueued_anew_after(world, monkeypatch, what):
    world.run(0, 1, 0)
    world.change(what, 0)
    anew = count_anew(world, monkeypatch)
    world.run(0, 1, 0)
    world.run(0, 1, 0)
    assert anew == [0]


def test_the_error_names_the_kernel(world):
    world.run(0, 1, 0)
    world.driver.refusals_in = 2
    message = r"clEnqueueNDRangeKernel\(kernel1\) failed: OUT_OF_RESOURCES"
    with pytest.raises(MzdError, match=message) as raised:
        world.rows[0].run(1, pytest.fail)
    assert raised.value.code == "device_lost"


def test_a_kernel_with_other_arguments_in_one_row_is_never_replayed(world):
    def twice():
        for value in (1, 2):
            world.kernels[0].set_int(1, value)
            world.kernels[0].enqueue((1,), (1,))

    for _ in range(3):
        world.rows[0].run(None, twice)
    values = [dict(arguments)[1] for _, _, _, arguments, _ in world.driver.launched]
    assert values == [1, 2, 1, 2, 1, 2]


class Anew(Replay):
    """Never replays."""

    def run(self, key, enqueue):
        enqueue()


class Model(LoadedModel):
    """A model with a second head unit, whose logits are others."""

    def __init__(self, device):
        super().__init__(device, FIXTURES / "llama2l-F32.gguf", ubatch_tokens=16)
        head = pack_units(self.file)[2]
        self.head_addresses = [self.head_address, self._put((head.view(np.float32) * 1.5).view(np.uint8))]

    def bind_units(self, order, num_chunks, head):
        """Bind the layers with each other's weights and chunks, in that order, and one of the heads."""
        for layer, unit in enumerate(order):
            chunks = self.chunk_addresses[unit][:num_chunks]
            self.engine.bind_layer(layer, self.layer_addresses[unit], chunks)
        self.engine.bind_head(self.head_addresses[head])

    async def logits(self, tokens, position, rows):
        self.engine.begin(np.array(tokens, np.int32), position)
        self.engine.enqueue_layers()
        self.engine.enqueue_head(rows)
        await self.engine.wait(self.engine.mark())
        return self.engine.logits().copy()


@pytest.fixture(scope="module")
def models(device):
    """Two engines over the same file, each with its own units and chunks; the first never replays."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (engine_module, head_graph_module):
            monkeypatch.setattr(module, "Replay", Anew)
        first = Model(device)
    pair = first, Model(device)
    yield pair
    for model in pair:
        model.close()


@pytest.mark.parametrize("seed", range(4))
async def test_an_engine_that_replays_computes_the_same(models, seed):
    """Random steps and bindings."""
    draw = random.Random(seed)
    position, num_chunks, head = draw.randrange(200), 1, 0
    order = list(range(models[0].engine.num_layers))
    for model in models:
        model.bind_units(order, num_chunks, head)
    for _ in range(40):
        count = draw.choice([1, 1, 1, 1, 2, 8, 16])
        if position + count > 256 * num_chunks or draw.random() < 0.15:
            num_chunks = min(num_chunks + 1, 4)
            draw.shuffle(order)
            head = draw.randrange(2)
            if draw.random() < 0.5:
                models[1].engine.unbind_all()
            for model in models:
                model.bind_units(order, num_chunks, head)
        tokens = [draw.randrange(3, 300) for _ in range(count)]
        rows = draw.choice(["last", "last", "all"]) if count <= 8 else "last"
        expected, actual = [await model.logits(tokens, position, rows) for model in models]
        assert np.array_equal(actual, expected)
        position = draw.randrange(256 * num_chunks - 16) if draw.random() < 0.2 else position + count


async def test_decoding_enqueues_single_launches_only_when_something_changed(models, monkeypatch):
    single = []
    enqueue = LaunchQueue.enqueue
    monkeypatch.setattr(
        LaunchQueue, "enqueue", lambda self, *launch: single.append(1) or enqueue(self, *launch)
    )
    models[1].bind_units([0, 1], 2, 0)
    counts = []
    for position in range(252, 260):
        single.clear()
        await models[1].logits([5], position, "last")
        counts.append(len(single))
    assert counts[0] > 0
    assert counts[4] > 0  # a chunk more
    assert sum(counts) == counts[0] + counts[4]
