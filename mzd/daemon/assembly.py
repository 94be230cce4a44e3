"""Owns the start: model, device, memory and disk are opened here, and closed again in reverse order."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mzd import native
from mzd.codec import codec_by_name
from mzd.daemon.config import Config
from mzd.daemon.unit_memory import open_unit_memory
from mzd.daemon.warm_up import warm_up
from mzd.daemon.wiring import STAGING_SLOT_BYTES, STAGING_SLOTS, UBATCH_TOKENS, Parts
from mzd.device.engine import Engine
from mzd.device.matmul import Activations
from mzd.device.opencl import OpenClDevice
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
    device: OpenClDevice
    contexts: ContextDirectory
    context_length: int
    store_bytes: int


@asynccontextmanager
async def open_everything(config: Config) -> AsyncIterator[Opened]:
    """Open model, device, arena and swap; compile and try the kernels.

    Raises:
        MzdError: what is missing or damaged, by its code.
    """
    native.set_mmap_threshold(MMAP_THRESHOLD_BYTES)
    with ExitStack() as stack:
        store = stack.enter_context(_open_store(config))
        state = _make_state_directory(config.state_directory)
        device = OpenClDevice.open(config.device or None, cache_dir=state / "kernels")
        stack.callback(device.close)
        context_length = _context_length(config, store.index.config)
        log.info("device: %s; compiling kernels (a first start takes a while)", device.name)
        activations: Activations = "int8" if config.activations == "int8" else "f32"
        self_test(device, store.index, activations=activations)
        engine = Engine(
            device,
            store.index,
            context_tokens_max=context_length,
            ubatch_tokens_max=UBATCH_TOKENS,
            activations=activations,
        )
        stack.callback(engine.close)
        contexts = ContextDirectory(state / "contexts")
        stack.callback(contexts.close)
        memory = open_unit_memory(device, stack, huge_pages=config.huge_pages, lock_memory=config.lock_memory)
        parts = _parts(config, store, memory, engine, contexts)
        await warm_up(parts)
        yield Opened(parts, device, contexts, context_length, os.fstat(store.fd).st_size)


def _open_store(config: Config) -> WeightStore:
    library = ModelLibrary(models_directory(os.environ))
    return WeightStore.open(library.resolve(config.model).store_path)


def _make_state_directory(state: Path) -> Path:
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        (state / "kernels").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise MzdError(
            "invalid_params", f"the state directory {state} cannot be made: {error.strerror}"
        ) from error
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
