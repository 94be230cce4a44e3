"""Owns a daemon in the bench's own process: the real parts and actors, driven as the service drives them.

What `mzd serve` adds is left out: the socket, the tokenizer, and the pressure monitor, which would evict
while the bench measures.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from mzd.actors.allocator import Allocator, AllocatorSettings
from mzd.benchmarks.kv_pattern import draw_chunks, lay_out
from mzd.benchmarks.models import BenchModel, cache_directory
from mzd.benchmarks.workloads import QUESTION_TOKENS, Workload
from mzd.daemon.assembly import Opened, open_everything
from mzd.daemon.config import Config, PressureConfig
from mzd.daemon.profiling import load_or_measure, subject_of
from mzd.daemon.wiring import Parts, System, wire
from mzd.errors import MzdError
from mzd.memory.restore_trace import RestoreTrace
from mzd.messages.evict_path import DropContext, Evict, EvictOutcome
from mzd.messages.reply import Reply
from mzd.messages.restore_path import OverlapMode
from mzd.policy.eviction_planner import Order
from mzd.policy.profile import DeviceProfile, unit_times
from mzd.policy.units import CHUNK_TOKENS

KV_SEED: Final = 8160
TOKENS_SEED: Final = 16_384
CONTEXT: Final = "bench"


@dataclass(frozen=True, slots=True)
class Asked:
    """One question over the context.

    Attributes:
        ttft_s: from the request to the first token's id.
        logits: (vocab,) float32, a copy.
        trace: of the restore; None where nothing had to come back.
        step_end_ns: monotonic.
    """

    ttft_s: float
    logits: NDArray[np.float32]
    trace: RestoreTrace | None
    step_end_ns: int


class BenchDaemon:
    """A daemon that runs, with at most one context; made by `open_daemon`.

    Attributes:
        remaining: the share of weights and KV that the last `evict_to` left in memory.
    """

    def __init__(self, opened: Opened, system: System, config: Config, profile: DeviceProfile) -> None:
        self.opened = opened
        self.system = system
        self.config = config
        self.profile = profile
        self.remaining = 1.0
        self._context = ""
        self._tokens: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._question: NDArray[np.int32] = np.empty(0, np.int32)
        self._reference: NDArray[np.float32] | None = None

    @property
    def allocator(self) -> Allocator:
        """The actor that knows where every unit is."""
        return self.system.allocator

    @property
    def parts(self) -> Parts:
        """What it works on."""
        return self.opened.parts

    @property
    def question(self) -> NDArray[np.int32]:
        """(8,) int32."""
        return self._question

    @property
    def num_tokens(self) -> int:
        """Of the context."""
        return len(self._tokens)

    def set_overlap(self, mode: OverlapMode) -> None:
        """For the restores to come."""
        self.allocator.restore_parts.overlap = mode

    def set_order(self, order: Order) -> None:
        """For the evictions to come."""
        self.allocator.settings.eviction_order = order

    async def fill(self, num_tokens: int, *, context: str = CONTEXT) -> None:
        """Put a context of `num_tokens` drawn tokens and KV in place of the one that was."""
        await self.drop()
        generator = np.random.default_rng(TOKENS_SEED)
        vocab_size = self.parts.store.index.config.vocab_size
        self._context = context
        self._tokens = generator.integers(0, vocab_size, num_tokens, dtype=np.uint32)
        self._question = generator.integers(0, vocab_size, QUESTION_TOKENS, dtype=np.int32)
        _, replies = await self.system.compute.restore(
            context, keep_tokens=0, capacity_tokens=num_tokens, announce=False
        )
        await replies.outcome.get()
        await trio.to_thread.run_sync(self._lay_out_kv)
        await self._finish()

    def _lay_out_kv(self) -> None:
        chunk_bytes = self.parts.units.kv_sizes.chunk_bytes
        cache = self.parts.units.caches[self._context]
        addresses = [int(a) for layer in range(cache.num_layers) for a in cache.chunk_addresses(layer)]
        lay_out(draw_chunks(self.parts.codec, chunk_bytes, seed=KV_SEED), addresses)

    async def drop(self) -> None:
        """Forget the context, in RAM and on flash."""
        if self._context:
            reply: Reply[bool] = Reply()
            await self.system.to_allocator.send(DropContext(self._context, reply))
            await reply.get()
            self._context = ""

    async def evict(self, goal_bytes: int) -> EvictOutcome:
        """Free at least so many bytes, as the RPC method `evict` does."""
        reply: Reply[EvictOutcome] = Reply()
        await self.system.to_allocator.send(Evict(goal_bytes, "bench", False, None, reply))
        return await reply.get()

    async def evict_to(self, remaining: float) -> EvictOutcome:
        """From everything resident to at most this share of weights and KV; the head unit goes too.

        Raises:
            MzdError: `internal`; more than that share is left.
        """
        snapshot = self.allocator.snapshot()
        counted_bytes = snapshot.full_bytes - snapshot.head.size_bytes
        goal_bytes = snapshot.full_bytes - int(remaining * counted_bytes)
        outcome = await self.evict(goal_bytes)
        units = self.parts.units
        left_bytes = self.allocator.resident_bytes() - units.head_bytes
        self.remaining = left_bytes / counted_bytes
        if self.remaining > remaining:
            raise MzdError(
                "internal", f"{self.remaining:.3f} of the model memory is left, asked for {remaining}"
            )
        return outcome

    async def restore(self) -> float:
        """Bring everything back, ahead of a request; seconds."""
        start_s = time.perf_counter()
        _, replies = await self.system.compute.restore(
            self._context, keep_tokens=self.num_tokens, capacity_tokens=self.num_tokens, announce=False
        )
        await replies.outcome.get()
        elapsed_s = time.perf_counter() - start_s
        await self._finish()
        return elapsed_s

    async def ask(self) -> Asked:
        """Ask the question and forget it again, so that the next one meets the same context.

        Raises:
            MzdError: `internal`; the logits differ from those of the first time, when all was in memory.
        """
        asked = await self._ask()
        if self._reference is None:
            if asked.trace is not None:
                raise MzdError("internal", "the first question must find everything in memory")
            self._reference = asked.logits
        if not np.array_equal(asked.logits, self._reference):
            raise MzdError("internal", "a restored context gave other logits than the one in memory")
        return asked

    async def _ask(self) -> Asked:
        compute, position = self.system.compute, self.num_tokens
        before = self.allocator.last_trace
        start_s = time.perf_counter()
        restore_id, replies = await compute.restore(
            self._context,
            keep_tokens=position,
            capacity_tokens=position + QUESTION_TOKENS + 1,
            announce=True,
        )
        done = await compute.step(restore_id, self._question.tolist(), position, logits="last", trace=True)
        logits = done.logits[0].copy()
        int(logits.argmax())
        ttft_s = time.perf_counter() - start_s
        outcome = await replies.outcome.get()
        await self._finish()
        trace = self.allocator.last_trace if outcome.restored_bytes else None
        assert trace is None or trace is not before
        return Asked(ttft_s, logits, trace, done.end_ns)

    async def _finish(self) -> None:
        """End the request, forget its tokens; an empty eviction behind it tells when that has been done."""
        await self.system.compute.finish(self._context, self._tokens)
        await self.evict(0)

    async def clear(self) -> None:
        """Give all memory back."""
        await self.drop()
        await self.evict(self.allocator.snapshot().full_bytes)


@asynccontextmanager
async def open_daemon(workload: Workload) -> AsyncIterator[BenchDaemon]:
    """Run a daemon for the block, its context filled and asked once with everything in memory.

    Raises:
        MzdError: what the daemon's own start meets.
    """
    caches = cache_directory()
    # PoCL reads it when its platform loads: without it every run would compile its kernels anew.
    os.environ.setdefault("POCL_CACHE_DIR", str(caches / "pocl"))
    with tempfile.TemporaryDirectory(prefix="state-", dir=caches) as state:
        config = _config(workload, state)
        with _models_from(workload.model):
            async with open_everything(config) as opened:
                profile = await load_or_measure(subject_of(config, opened.device, opened.parts.store))
                system = wire(opened.parts, config, _settings(config, opened.parts, profile), None)
                async with trio.open_nursery() as nursery:
                    for run in system.runs:
                        nursery.start_soon(run)
                    daemon = BenchDaemon(opened, system, config, profile)
                    await daemon.fill(workload.context_tokens)
                    await daemon.ask()
                    yield daemon
                    await daemon.clear()
                    await system.aclose()


def _config(workload: Workload, state: str) -> Config:
    """What a user gets by default, for a context with room for the question."""
    with_question = workload.context_tokens + QUESTION_TOKENS + 1
    room_tokens = -(-with_question // CHUNK_TOKENS) * CHUNK_TOKENS
    return Config(
        model=workload.model.name, state=state, context=room_tokens, pressure=PressureConfig(enabled=False)
    )


@contextmanager
def _models_from(model: BenchModel) -> Iterator[None]:
    """Let the daemon look for models where `model` lies."""
    before = os.environ.get("MZD_HOME")
    os.environ["MZD_HOME"] = str(Path(model.library).parent)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MZD_HOME"]
        else:
            os.environ["MZD_HOME"] = before


def _settings(config: Config, parts: Parts, profile: DeviceProfile) -> AllocatorSettings:
    """As the daemon's own, with no floor: nobody else's memory is at stake."""
    layer_bytes = float(np.mean([extent.size_bytes for extent in parts.store.index.layers]))
    return AllocatorSettings(
        restore_wait_s=config.restore_wait_s,
        eviction_order=Order(config.eviction_order),
        times=unit_times(profile, chunk_bytes=parts.units.kv_sizes.chunk_bytes, layer_bytes=layer_bytes),
    )
