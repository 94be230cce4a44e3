"""Owns the start: model, device, memory and disk are opened here, and closed again in reverse order."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from mzd import native
from mzd.codec import codec_by_name
from mzd.daemon.config import AUTO, Config
from mzd.daemon.device_choice import ChosenDevice, choose_device
from mzd.daemon.kernel_cache import PRODUCTS_FILE, KernelCache, check_writable
from mzd.daemon.refused_devices import Refusal, keep_refusals, last_refusals
from mzd.daemon.start_clock import StartClock
from mzd.daemon.text import Text, read_text
from mzd.daemon.unit_memory import open_unit_memory
from mzd.daemon.warm_up import warm_up
from mzd.daemon.wiring import STAGING_SLOT_BYTES, STAGING_SLOTS, UBATCH_TOKENS, Parts
from mzd.device.engine import Engine
from mzd.device.matmul import Activations
from mzd.device.opencl import OpenClDevice, prepare_environment
from mzd.device.product_plan import measured_choices
from mzd.device.self_test import self_test
from mzd.errors import MzdError
from mzd.formats.model_config import ModelConfig
from mzd.memory.backend import MemoryBackend
from mzd.memory.baseline import Baseline
from mzd.memory.context_directory import ContextDirectory
from mzd.memory.in_memory_swap import InMemorySwap
from mzd.memory.pressure_sources import PressureProbes
from mzd.memory.staging import StagingPool
from mzd.memory.storage_swap import StorageSwap
from mzd.memory.unit_table import UnitTable
from mzd.memory.workers import check_cores
from mzd.model.library import ModelLibrary, models_directory
from mzd.model.weight_store import WeightStore
from mzd.policy.pressure import (
    MemoryRoom,
    PressurePolicy,
    PressureSnapshot,
    PressureUnknown,
    available_and_floor,
)
from mzd.policy.snapshot import KvSizes
from mzd.policy.units import CHUNK_TOKENS, PAGE_BYTES

log = logging.getLogger(__name__)

MMAP_THRESHOLD_BYTES = 128 * 1024
"""Fixed, so that glibc does not keep large blocks in its heap after the first one was freed."""

UNLIMITED_BYTES = 1 << 62


@dataclass(slots=True)
class Opened:
    """Everything that the daemon has open."""

    parts: Parts
    chosen: ChosenDevice
    text: Text
    contexts: ContextDirectory
    context_length: int
    store_bytes: int

    @property
    def device(self) -> OpenClDevice:
        """The device that computes."""
        return self.chosen.device


@asynccontextmanager
async def open_everything(config: Config, clock: StartClock | None = None) -> AsyncIterator[Opened]:
    """Open model, device, memory and swap; compile and try the kernels.

    Args:
        clock: of the start; a new one if the process has not just begun.

    Raises:
        MzdError: what is missing or damaged, by its code, alone or in a group.
    """
    clock = clock or StartClock()
    native.set_mmap_threshold(MMAP_THRESHOLD_BYTES)
    with ExitStack() as stack:
        with clock.part("model"):
            store = stack.enter_context(_open_store(config))
        context_length = _context_length(config, store.index.config)
        check_cores(config.threads.cores)
        state = _make_state_directory(config.state_directory)
        # First of all in there: a daemon that runs already uses the compiled kernels.
        contexts = ContextDirectory(state / "contexts")
        stack.callback(contexts.close)
        cache = KernelCache(state / "kernels", last_refusals(state))
        starting = stack.enter_context(ExitStack())
        starting.enter_context(cache.in_use())
        chosen, text = await _device_and_text(config, store, cache, stack, clock)
        with clock.part("engine"):
            engine = _engine(config, chosen.device, store, context_length)
        stack.callback(engine.close)
        memory = open_unit_memory(
            chosen.device, stack, huge_pages=config.huge_pages, lock_memory=config.lock_memory
        )
        parts = _parts(config, store, memory, engine, contexts)
        with clock.part("warm-up"):
            await warm_up(parts)
        starting.close()
        yield Opened(parts, chosen, text, contexts, context_length, os.fstat(store.fd).st_size)


async def _device_and_text(
    config: Config, store: WeightStore, cache: KernelCache, stack: ExitStack, clock: StartClock
) -> tuple[ChosenDevice, Text]:
    """Choose the device and build the tokenizer side by side: the driver holds no GIL while it compiles."""
    prepare_environment(cache.path)
    log.info("choosing a device; a first start compiles its kernels, which takes a while")
    texts: list[Text] = []

    def read() -> None:
        with clock.part("tokenizer"):
            texts.append(read_text(store.index.tokenizer))

    def choose() -> ChosenDevice:
        with clock.part("device"):
            return _proven_device(config, store, cache)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, read)
        chosen = await trio.to_thread.run_sync(choose)
        stack.callback(chosen.device.close)
    return chosen, texts[0]


def _proven_device(config: Config, store: WeightStore, cache: KernelCache) -> ChosenDevice:
    """Choose a device that passes the self-test; what is refused is noted, also where none is left."""
    refusals: list[Refusal] = []
    try:
        return choose_device(
            config,
            partial(OpenClDevice, cache_dir=cache.path),
            lambda device: self_test(device, store.index, activations=activations_of(config, device)),
            refusals=refusals,
            cache=cache,
        )
    finally:
        keep_refusals(config.state_directory, refusals)


def _engine(config: Config, device: OpenClDevice, store: WeightStore, context_length: int) -> Engine:
    activations = activations_of(config, device)
    return Engine(
        device,
        store.index,
        context_tokens_max=context_length,
        ubatch_tokens_max=UBATCH_TOKENS,
        activations=activations,
        choices=measured_choices(
            device,
            store.index,
            tokens_max=UBATCH_TOKENS,
            activations=activations,
            path=config.state_directory / "kernels" / PRODUCTS_FILE,
        ),
    )


def activations_of(config: Config, device: OpenClDevice) -> Activations:
    """What `config.activations` means on a device.

    ``auto`` rounds on a CPU, where a step then takes 15 to 25 % less time; a GPU waits more for memory.
    """
    if config.activations == AUTO:
        return "int8" if device.kernel_class == "cpu" else "f32"
    return "int8" if config.activations == "int8" else "f32"


def _open_store(config: Config) -> WeightStore:
    return ModelLibrary(models_directory(os.environ)).open_store(config.model)


def _make_state_directory(state: Path) -> Path:
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / "kernels").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise MzdError(
            "invalid_params", f"the state directory {state} cannot be made: {error.strerror}"
        ) from error
    check_writable(state)
    check_writable(state / "kernels")
    return state


def _context_length(config: Config, model: ModelConfig) -> int:
    if config.context > model.context_length:
        raise MzdError(
            "invalid_params",
            f"the model was made for {model.context_length} tokens, not {config.context}",
            parameter="context",
        )
    return config.context or model.context_length


def _parts(
    config: Config, store: WeightStore, memory: MemoryBackend, engine: Engine, contexts: ContextDirectory
) -> Parts:
    index = store.index
    codec = codec_by_name(config.codec)
    sizes = _kv_sizes(index.config.kv_chunk_bytes(CHUNK_TOKENS), codec.payload_bytes)
    quota_bytes = (config.swap.quota_bytes or UNLIMITED_BYTES) if config.swap.storage else 0
    return Parts(
        engine=engine,
        store=store,
        units=UnitTable([extent.size_bytes for extent in index.layers], index.head.size_bytes, sizes),
        memory=memory,
        payloads=InMemorySwap(),
        storage=StorageSwap(contexts, model_id=index.model_id, quota_bytes=quota_bytes),
        staging=StagingPool(max(STAGING_SLOT_BYTES, sizes.compressed_slot_bytes), STAGING_SLOTS),
        codec=codec,
        room=partial(_room, PressureProbes.open(), config.pressure.policy()),
        baseline=Baseline(),
    )


def _room(probes: PressureProbes, policy: PressurePolicy) -> MemoryRoom | None:
    """What is available where memory is tightest, and the floor there: as the pressure monitor sees it."""
    unknown = PressureUnknown("a restore does not ask for stall")
    snapshot = PressureSnapshot(
        psi=unknown, memory=probes.memory(), cgroup=probes.cgroup_memory(), triggered=False, now_s=0.0
    )
    tightest = available_and_floor(snapshot, policy)
    return None if isinstance(tightest, PressureUnknown) else tightest


def _kv_sizes(chunk_bytes: int, payload_bytes: Callable[[int], int]) -> KvSizes:
    compressed = -(-payload_bytes(chunk_bytes) // PAGE_BYTES) * PAGE_BYTES
    return KvSizes(
        chunk_bytes=chunk_bytes,
        compressed_bytes=compressed,
        slot_bytes=chunk_bytes,
        compressed_slot_bytes=compressed,
    )
