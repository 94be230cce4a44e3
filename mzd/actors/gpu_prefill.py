"""Owns the device: binds units as they become ready and runs steps over them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import trio
from pyopencl import Event

from mzd.device.engine import Engine
from mzd.errors import MzdError
from mzd.memory.restore_trace import Span
from mzd.memory.workers import Workers
from mzd.messages.compute import RunStep, StepDone
from mzd.messages.restore_path import HeadReady, LayerReady, Readiness, RestoreFailed
from mzd.model.weight_store import WeightStore

LAYERS_AHEAD = 2
"""Layers enqueued ahead of the device in a long step: enough to hide the enqueue, few enough to stop soon."""

SHORT_STEP_TOKENS = 8
"""Steps up to this many tokens are enqueued whole: they end in milliseconds and nobody can cancel sooner."""


SPANS_KEPT = 4096
"""Layers whose time is remembered for traces: some dozens of restores."""


@dataclass(slots=True)
class _ReadyUnits:
    """What the newest announced restore has made ready so far. Older restores' events are stale."""

    restore_id: int = -1
    layers: dict[int, LayerReady] = field(default_factory=dict)
    head: HeadReady | None = None
    failure: MzdError | None = None
    changed: trio.Event = field(default_factory=trio.Event)

    def take(self, event: Readiness) -> None:
        """Note an event and wake whoever waits for it."""
        if event.restore_id < self.restore_id:
            return
        if event.restore_id > self.restore_id:
            self.restore_id, self.layers, self.head, self.failure = event.restore_id, {}, None, None
        match event:
            case LayerReady():
                self.layers[event.layer] = event
            case HeadReady():
                self.head = event
            case RestoreFailed():
                self.failure = event.error
        self.changed.set()
        self.changed = trio.Event()


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """A layer that the device has, or will have, and the event of its end."""

    layer: int
    begun_ns: int
    event: Event
    traced: bool


@dataclass(slots=True)
class GpuPrefill:
    """Restore path, last step. The only user of the engine; what it binds was announced by the allocator.

    Cancelled: the layers already enqueued end first, since their units must not move under them.

    Attributes:
        spans: when the device had which layer, by restore; traces show it beside the restore itself.
    """

    engine: Engine
    store: WeightStore
    workers: Workers
    steps: trio.MemoryReceiveChannel[RunStep]
    readiness: trio.MemoryReceiveChannel[Readiness]
    spans: deque[tuple[int, Span]] = field(default_factory=lambda: deque(maxlen=SPANS_KEPT))
    _ready: _ReadyUnits = field(default_factory=_ReadyUnits)
    _bound_id: int = -1
    _bound_layers: set[int] = field(default_factory=set)
    _head_bound: bool = False

    async def run(self) -> None:
        """Serve steps until the generation service and the allocator close their ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            async with self.steps:
                try:
                    async for step in self.steps:
                        await self._serve(step)
                finally:
                    self._refuse_waiting()

    async def _listen(self) -> None:
        """Take events at once: the allocator must never wait for a step that nobody asked for."""
        async with self.readiness:
            async for event in self.readiness:
                self._ready.take(event)

    async def _serve(self, step: RunStep) -> None:
        try:
            step.reply.set(await self._run_step(step))
        except MzdError as error:
            step.reply.fail(error)
        except BaseException:  # whoever asked waits behind a shield, and must not wait for ever
            step.reply.fail(_ended())
            raise

    def _refuse_waiting(self) -> None:
        """Answer the steps that nobody will run any more."""
        while True:
            try:
                self.steps.receive_nowait().reply.fail(_ended())
            except (trio.WouldBlock, trio.EndOfChannel):
                return

    async def _run_step(self, step: RunStep) -> StepDone:
        start_ns = time.monotonic_ns()
        if step.restore_id != self._bound_id:
            self._forget_bindings(step.restore_id)
        await self._begin(step)
        ahead: deque[_Enqueued] = deque()
        try:
            await self._enqueue_layers(step, ahead)
            if step.logits != "none":
                await self._wait_ready(step, self._bind_head)
                self.engine.enqueue_head(step.logits)
        finally:
            await self._finish(ahead)
        logits = self.engine.logits() if step.logits != "none" else np.empty((0, 0), np.float32)
        return StepDone(logits, start_ns, time.monotonic_ns())

    def _forget_bindings(self, restore_id: int) -> None:
        self.engine.unbind_all()
        self._bound_id = restore_id
        self._bound_layers.clear()
        self._head_bound = False

    async def _begin(self, step: RunStep) -> None:
        embeddings = None
        if not self._bind_head():
            # The head unit comes back last; the few rows of the new tokens are read by themselves.
            embeddings = await self.workers.run(self.store.read_rows, "token_embd", step.tokens)
        self.engine.begin(step.tokens, step.position, embeddings)

    async def _enqueue_layers(self, step: RunStep, ahead: deque[_Enqueued]) -> None:
        whole = len(step.tokens) <= SHORT_STEP_TOKENS and not step.trace
        if whole and all(map(self._bind_layer, range(self.engine.num_layers))):
            _refuse_abandoned(step)
            self.engine.enqueue_layers()
            return
        for layer in range(self.engine.num_layers):
            await self._wait_ready(step, partial(self._bind_layer, layer))
            begun_ns = time.monotonic_ns()
            self.engine.enqueue_layer(layer)
            if not whole:
                ahead.append(_Enqueued(layer, begun_ns, self.engine.mark(), step.trace))
            if len(ahead) > LAYERS_AHEAD:
                await self._retire(ahead.popleft())

    async def _finish(self, ahead: deque[_Enqueued]) -> None:
        """Wait for everything that is enqueued; the newest mark ends the step, so it comes last."""
        end = self.engine.mark()
        if ahead:
            with trio.CancelScope(shield=True):
                while ahead:
                    await self._retire(ahead.popleft())
        await self.engine.wait(end)  # to its end, cancelled or not

    async def _retire(self, enqueued: _Enqueued) -> None:
        await self.engine.wait(enqueued.event)
        if enqueued.traced:  # later passes of a long prompt would hide the restore beside them
            span = Span("prefill", enqueued.layer, enqueued.begun_ns, time.monotonic_ns(), 0)
            self.spans.append((self._bound_id, span))

    async def _wait_ready(self, step: RunStep, bind: Callable[[], bool]) -> None:
        """Wait until `bind` finds its unit ready; ends early when nobody wants the step any more."""
        while not bind():
            _refuse_abandoned(step)
            if self._ready.restore_id == step.restore_id and self._ready.failure is not None:
                raise self._ready.failure
            await self._ready.changed.wait()
        _refuse_abandoned(step)

    def _bind_layer(self, layer: int) -> bool:
        if layer in self._bound_layers:
            return True
        event = self._ready.layers.get(layer)
        if self._ready.restore_id != self._bound_id or event is None:
            return False
        self.engine.bind_layer(layer, event.weights_address, event.chunk_addresses)
        self._bound_layers.add(layer)
        return True

    def _bind_head(self) -> bool:
        if not self._head_bound and self._ready.restore_id == self._bound_id and self._ready.head is not None:
            self.engine.bind_head(self._ready.head.address)
            self._head_bound = True
        return self._head_bound


def _refuse_abandoned(step: RunStep) -> None:
    if step.ticket.abandoned:
        raise MzdError("cancelled", "the request was cancelled")


def _ended() -> MzdError:
    return MzdError("device_lost", "the device's actor has ended")
