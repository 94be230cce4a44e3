"""Owns the one-screen answer to how things stand. Reads everything, wakes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import trio

from mzd import __version__
from mzd.actors.allocator import Allocator
from mzd.actors.pressure_monitor import PressureMonitor
from mzd.daemon.conversations import Conversation, Conversations
from mzd.daemon.device_choice import ChosenDevice
from mzd.daemon.turnstile import Turnstile
from mzd.device.engine import Engine
from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError
from mzd.memory.backend import MemoryBackend
from mzd.memory.baseline import Baseline
from mzd.memory.context_archive import ContextArchive
from mzd.memory.ledger import Ledger, MemoryKind
from mzd.memory.process_memory import read_process_memory
from mzd.memory.staging import StagingPool
from mzd.memory.unit_table import KvCache
from mzd.model.weight_store import WeightStore
from mzd.policy.profile import DeviceProfile
from mzd.policy.residency import PAYLOAD_STATES, UnitState


@dataclass(slots=True)
class StatusReporter:
    """Looks at every part through its frozen statistics."""

    allocator: Allocator
    memory: MemoryBackend
    staging: StagingPool
    engine: Engine
    chosen: ChosenDevice
    store: WeightStore
    conversations: Conversations
    archive: ContextArchive
    turnstile: Turnstile
    pressure: PressureMonitor | None
    profile: DeviceProfile
    context_length: int
    baseline: Baseline
    activations: str
    store_bytes: int
    quota_bytes: int
    ready_s: float = 0.0
    clock: Callable[[], float] = trio.current_time

    def status(self) -> dict[str, Any]:
        """The result of the RPC method `status`. A quota of 0 is no limit but the file system's."""
        return {
            "version": __version__,
            "state": self._state(),
            "ready_s": self.ready_s,
            "model": self._model(),
            "device": self._device(),
            "memory": self._memory(),
            "storage": self._storage(),
            "pressure": asdict(self.pressure.statistics()) if self.pressure is not None else None,
            "profile": asdict(self.profile),
            "contexts": self.contexts(),
        }

    def _state(self) -> str:
        if self.allocator.state != "idle":
            return self.allocator.state
        return "generating" if self.turnstile.occupied else "idle"

    def _model(self) -> dict[str, Any]:
        config = self.store.index.config
        return {
            "name": self.store.path.parent.name,
            "title": config.name,
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "context_length": self.context_length,
            "file": self.store.index.source.name,
        }

    def _device(self) -> dict[str, Any]:
        device = self.chosen.device
        return {
            "name": device.name,
            "driver": device.driver,
            "memory_backend": _memory_backend(device),
            "huge_pages": self.memory.statistics().huge_pages,
            "kernels": f"{device.kernel_class} kernels, {self.activations} activations",
            "pointer_lists": device.pointer_lists.used,
            "refused": [asdict(refusal) for refusal in self.chosen.refusals],
        }

    def ledger(self) -> Ledger:
        """The account of every byte, as the parts tell it now."""
        ledger = Ledger()
        units = self.allocator.units
        ledger.set(MemoryKind.WEIGHTS, units.weights_bytes)
        ledger.set(MemoryKind.KV, units.kv_bytes)
        ledger.set(MemoryKind.HEAD, units.head_bytes)
        ledger.set(MemoryKind.COMPRESSED, self._compressed_bytes())
        ledger.set(MemoryKind.STAGING, self.staging.size_bytes)
        # The engine's scratch is touched before the baseline is taken, and lies in it.
        ledger.set(MemoryKind.SCRATCH, self.engine.scratch_bytes)
        ledger.set(MemoryKind.BASELINE, self.baseline.size_bytes - self.engine.scratch_bytes)
        return ledger

    def _compressed_bytes(self) -> int:
        return self.allocator.restore_parts.payloads.statistics().resident_bytes

    def _memory(self) -> dict[str, Any]:
        units = self.allocator.units
        evictable = 0 if units.in_use else units.resident_bytes() + self._compressed_bytes()
        return {
            **self.ledger().snapshot().fields(),
            "kernel_bytes": read_process_memory().rss_bytes,
            "evictable_bytes": evictable,
            "full_bytes": self.full_bytes(),
        }

    def full_bytes(self) -> int:
        """The whole model memory, were everything resident."""
        return self.allocator.snapshot().full_bytes

    def resident_bytes(self) -> int:
        """Model memory in RAM."""
        return self.allocator.resident_bytes()

    def _storage(self) -> dict[str, Any]:
        swap = self.allocator.restore_parts.storage.statistics()
        return {
            "store_bytes": self.store_bytes,
            "swap_bytes": swap.swap_bytes,
            "quota_bytes": self.quota_bytes,
            "written_bytes": swap.written_bytes,
        }

    def contexts(self) -> list[dict[str, Any]]:
        """The result of the RPC method `contexts`, most recently used first."""
        now_s = self.clock()
        live = sorted(self.conversations, key=lambda c: c.last_used_s, reverse=True)
        usable = [self._context(conversation, now_s) for conversation in live]
        return usable + [_stale(name, error) for name, error in self.archive.unusable.items()]

    def _context(self, conversation: Conversation, now_s: float) -> dict[str, Any]:
        units = self.allocator.units
        cache = units.caches.get(conversation.name) or KvCache(conversation.name, len(units.weights))
        sizes = units.kv_sizes
        compressed_on_flash = cache.count([UnitState.STORED_COMPRESSED, UnitState.READING_COMPRESSED])
        return {
            "context": conversation.name,
            "tokens": len(conversation.tokens),
            "resident_bytes": len(cache.leases) * sizes.chunk_bytes,
            "compressed_bytes": cache.count(PAYLOAD_STATES) * sizes.compressed_bytes,
            "stored_bytes": cache.count([UnitState.STORED, UnitState.READING]) * sizes.slot_bytes
            + compressed_on_flash * sizes.compressed_slot_bytes,
            "last_used_s": max(0.0, now_s - conversation.last_used_s),
            "pinned": False,
            "state": "ok",
        }


def _memory_backend(device: OpenClDevice) -> str:
    """How units lie in the device's memory."""
    if device.owns_host_pages:
        return f"arena in {device.svm_level} SVM"
    kinds = {
        "fine_svm": "fine-grain SVM, an allocation a unit",
        "coarse_svm": "coarse-grain SVM, an allocation a unit, mapped for the host",
        "staged": "buffers in the device's memory, filled through pinned memory",
        "buffers": "buffers, mapped for the host",
    }
    return kinds[device.memory_kind]


def _stale(name: str, error: MzdError) -> dict[str, Any]:
    """A context that is kept and cannot be used; `reason` is the code that its use would get."""
    return {
        "context": name,
        "tokens": error.data.get("tokens", 0),
        "resident_bytes": 0,
        "compressed_bytes": 0,
        "stored_bytes": 0,
        "last_used_s": None,
        "pinned": False,
        "state": "stale",
        "reason": error.code,
    }
