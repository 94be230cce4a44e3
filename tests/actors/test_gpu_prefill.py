"""gpu_prefill on a fake engine, in virtual time: what is bound, when, and how a step ends."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from mzd.actors.gpu_prefill import LAYERS_AHEAD, GpuPrefill
from mzd.errors import MzdError
from mzd.messages.compute import RunStep, StepTicket
from mzd.messages.reply import Reply
from mzd.messages.restore_path import HeadReady, LayerReady, RestoreFailed
from tests.actors.edges import InlineWorkers

LAYERS = 6
LAYER_S = 1.0


class FakeEngine:
    """Takes a second for each layer; says what it was told, and refuses what a real one would."""

    num_layers = LAYERS

    def __init__(self):
        self.log = []
        self.bound = {}
        self.running = False
        self._busy_until_s = 0.0

    def unbind_all(self):
        assert not self.running
        self.bound.clear()

    def bind_layer(self, layer, weights_address, chunk_addresses):
        self.bound[layer] = weights_address

    def bind_head(self, address):
        self.bound["head"] = address

    def begin(self, tokens, position, embeddings=None):
        assert not self.running
        assert embeddings is not None or "head" in self.bound
        self.running = True
        self.log.append(("begin", len(tokens), position, embeddings is not None))

    def enqueue_layer(self, layer):
        self.log.append((layer, self.bound[layer]))
        self._busy_until_s = max(self._busy_until_s, trio.current_time()) + LAYER_S

    def enqueue_layers(self):
        for layer in range(LAYERS):
            self.enqueue_layer(layer)
        self.log.append("at once")

    def enqueue_head(self, rows):
        self.log.append((rows, self.bound["head"]))

    def mark(self):
        return self._busy_until_s

    async def wait(self, event):
        with trio.CancelScope(shield=True):
            await trio.sleep_until(event)
        self.running = trio.current_time() < self._busy_until_s

    def logits(self):
        assert not self.running
        return np.ones((1, 3), np.float32)


class FakeStore:
    """Embedding rows."""

    def read_rows(self, role, tokens):
        assert role == "token_embd"
        return np.zeros((len(tokens), 4), np.float32)


class Gpu:
    """The actor with both its inputs."""

    def __init__(self):
        self.engine = FakeEngine()
        self.to_steps, steps = trio.open_memory_channel(4)
        self.to_readiness, readiness = trio.open_memory_channel(2)
        self.actor = GpuPrefill(self.engine, FakeStore(), InlineWorkers(), steps, readiness)

    async def ready(self, restore_id, layers, head=True):
        for layer in layers:
            table = np.zeros(1, np.uint64)
            await self.to_readiness.send(LayerReady(restore_id, layer, 100 * restore_id + layer, table))
        if head:
            await self.to_readiness.send(HeadReady(restore_id, 100 * restore_id + 99))

    async def step(self, restore_id=1, count=16, logits="last", ticket=None):
        """Send a step; returns its reply."""
        reply = Reply()
        tokens = np.zeros(count, np.int32)
        await self.to_steps.send(RunStep(restore_id, tokens, 0, logits, ticket or StepTicket(), reply))
        return reply

    @property
    def layers(self):
        """(layer, address) in the order in which they were enqueued."""
        return [entry for entry in self.engine.log if len(entry) == 2 and entry[0] in range(LAYERS)]


@pytest.fixture
async def gpu(nursery):
    gpu = Gpu()
    nursery.start_soon(gpu.actor.run)
    return gpu


async def test_a_step_over_ready_units(autojump_clock, gpu):
    await gpu.ready(1, range(LAYERS))
    await trio.testing.wait_all_tasks_blocked()
    done = await (await gpu.step()).get()
    assert gpu.layers == [(layer, 100 + layer) for layer in range(LAYERS)]
    assert gpu.engine.log[0] == ("begin", 16, 0, False)
    assert gpu.engine.log[-1] == ("last", 199)
    assert done.logits.shape == (1, 3)
    assert done.start_ns <= done.end_ns


@pytest.mark.parametrize(
    ("count", "ready", "at_once"), [(1, 6, True), (8, 6, True), (9, 6, False), (1, 5, False)]
)
async def test_a_short_step_over_ready_units_is_enqueued_at_once(autojump_clock, gpu, count, ready, at_once):
    await gpu.ready(1, range(ready))
    reply = await gpu.step(count=count)
    await trio.sleep(1)
    await gpu.ready(1, range(ready, LAYERS))
    await reply.get()
    assert gpu.layers == [(layer, 100 + layer) for layer in range(LAYERS)]
    assert ("at once" in gpu.engine.log) == at_once


async def test_an_abandoned_short_step_enqueues_nothing(autojump_clock, gpu):
    await gpu.ready(1, range(LAYERS))
    ticket = StepTicket()
    ticket.abandoned = True
    reply = await gpu.step(count=1, ticket=ticket)
    with pytest.raises(MzdError, match="cancelled"):
        await reply.get()
    assert gpu.layers == []
    assert not gpu.engine.running


@given(order=st.permutations(range(LAYERS)), random=st.random_module())
def test_layers_run_in_order_whatever_order_they_come_in(order, random):
    """And none before it was announced; the head is read row by row, as it comes last."""

    async def scenario():
        gpu = Gpu()
        announced = []
        enqueue = gpu.engine.enqueue_layer

        def watched(layer):
            assert layer in announced
            enqueue(layer)

        gpu.engine.enqueue_layer = watched
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gpu.actor.run)
            reply = await gpu.step()
            for layer in order:
                await trio.sleep(0.3)
                announced.append(layer)
                await gpu.ready(1, [layer], head=False)
            await trio.sleep(30)
            assert len(gpu.layers) == LAYERS
            assert not reply.is_settled
            await gpu.ready(1, [])
            await reply.get()
            nursery.cancel_scope.cancel()
        assert [layer for layer, _ in gpu.layers] == list(range(LAYERS))
        assert gpu.engine.log[0] == ("begin", 16, 0, True)

    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_without_logits_the_head_is_not_waited_for(autojump_clock, gpu):
    await gpu.ready(1, range(LAYERS), head=False)
    done = await (await gpu.step(logits="none")).get()
    assert done.logits.size == 0


async def test_a_restore_that_fails_fails_its_step(autojump_clock, gpu):
    await gpu.ready(1, [0, 1], head=False)
    reply = await gpu.step()
    await trio.sleep(5)
    await gpu.to_readiness.send(RestoreFailed(1, MzdError("weights_unavailable", "gone")))
    with pytest.raises(MzdError, match="gone"):
        await reply.get()
    assert not gpu.engine.running
    await gpu.ready(2, range(LAYERS))
    await (await gpu.step(2)).get()


async def test_units_of_an_older_restore_are_bound_no_more(autojump_clock, gpu):
    """They may have moved: the same layers have other addresses now."""
    await gpu.ready(1, range(LAYERS))
    await (await gpu.step(1)).get()
    reply = await gpu.step(2)
    await trio.testing.wait_all_tasks_blocked()
    assert not gpu.engine.bound
    await gpu.ready(2, [0], head=False)
    await gpu.ready(1, range(1, LAYERS))  # late, and stale
    await trio.sleep(10)
    assert not reply.is_settled
    await gpu.ready(2, range(1, LAYERS))
    await reply.get()
    assert gpu.layers[LAYERS:] == [(layer, 200 + layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("after_s", [0.5, 2.5])
async def test_an_abandoned_step_ends_after_the_layers_in_hand(autojump_clock, gpu, after_s):
    """While all is ready: within the layers ahead. It answers `cancelled`, and the engine is idle."""
    await gpu.ready(1, range(LAYERS))
    ticket = StepTicket()
    reply = await gpu.step(ticket=ticket)
    await trio.sleep(after_s)
    abandoned_s = trio.current_time()
    ticket.abandoned = True
    with pytest.raises(MzdError) as raised:
        await reply.get()
    assert raised.value.code == "cancelled"
    assert not gpu.engine.running
    assert len(gpu.layers) <= after_s / LAYER_S + 1 + LAYERS_AHEAD
    assert trio.current_time() <= abandoned_s + (LAYERS_AHEAD + 1) * LAYER_S


async def test_an_abandoned_step_that_waits_ends_with_its_restore(autojump_clock, gpu):
    ticket = StepTicket()
    reply = await gpu.step(ticket=ticket)
    await trio.sleep(1)
    ticket.abandoned = True
    await gpu.to_readiness.send(RestoreFailed(1, MzdError("cancelled", "abandoned")))
    with pytest.raises(MzdError) as raised:
        await reply.get()
    assert raised.value.code == "cancelled"


async def test_a_long_step_enqueues_a_few_layers_ahead_and_a_short_one_all(autojump_clock, gpu):
    await gpu.ready(1, range(LAYERS))
    await gpu.step(count=9)
    await trio.sleep(0.1)
    assert len(gpu.layers) == LAYERS_AHEAD + 1
    await (await gpu.step(count=8)).get()
    assert len(gpu.layers) == 2 * LAYERS


async def test_an_engine_that_fails_answers_before_it_ends_the_actor(autojump_clock, gpu, monkeypatch):
    """Whoever asked waits behind a shield."""
    gpu = Gpu()
    await gpu.ready(1, [0], head=False)
    monkeypatch.setattr(gpu.engine, "begin", lambda *args: 1 / 0)
    replies = [await gpu.step(), await gpu.step()]
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        await gpu.actor.run()
    for reply in replies:
        with pytest.raises(MzdError) as raised:
            await reply.get()
        assert raised.value.code == "device_lost"


@pytest.mark.parametrize("cancel_s", [0.5, 3.5])
async def test_cancelled_the_device_is_idle_first(autojump_clock, cancel_s):
    """And every step is answered, the one that runs and the ones that wait."""
    gpu = Gpu()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gpu.actor.run)
        await gpu.ready(1, range(LAYERS))
        replies = [await gpu.step(), await gpu.step()]
        await trio.sleep(cancel_s)
        nursery.cancel_scope.cancel()
    assert not gpu.engine.running
    assert all(reply.is_settled for reply in replies)


async def test_the_end_of_both_inputs_is_the_end(autojump_clock):
    gpu = Gpu()
    gpu.to_steps.close()
    gpu.to_readiness.close()
    await gpu.actor.run()
