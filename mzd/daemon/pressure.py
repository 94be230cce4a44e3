"""Owns how the configuration becomes a pressure monitor."""

from __future__ import annotations

from functools import partial

import trio

from mzd.actors.pressure_monitor import PressureMonitor
from mzd.daemon.config import PressureConfig
from mzd.daemon.wiring import MonitorFactory, Parts
from mzd.memory.pressure_sources import PressureProbes
from mzd.memory.pressure_triggers import open_triggers
from mzd.messages.evict_path import Evict
from mzd.policy.pressure import MemoryReading, ModelMemory, PressurePolicy


def pressure_policy(config: PressureConfig) -> PressurePolicy:
    """The thresholds."""
    return PressurePolicy(
        floor_bytes=config.floor_bytes,
        step_fraction=config.step_fraction,
        poll_s=config.poll_s,
        psi_some_avg10=config.psi_some_avg10,
    )


def restore_floor_bytes(config: PressureConfig) -> int:
    """What a restore leaves available: the floor at which the monitor would take its memory again."""
    memory = PressureProbes.open().memory()
    total_bytes = memory.total_bytes if isinstance(memory, MemoryReading) else 0
    return pressure_policy(config).floor_of(total_bytes) if config.enabled else 0


def monitor_factory(config: PressureConfig, parts: Parts) -> MonitorFactory:
    """A maker of the monitor, for `wire`."""
    return partial(_make_monitor, config, parts)


def _make_monitor(
    config: PressureConfig, parts: Parts, evictions: trio.MemorySendChannel[Evict]
) -> PressureMonitor:
    probes = PressureProbes.open()
    return PressureMonitor(
        probes=probes,
        triggers=open_triggers(),
        policy=pressure_policy(config),
        model_memory=partial(_model_memory, parts),
        evictions=evictions,
    )


def _model_memory(parts: Parts) -> ModelMemory:
    """What there is and what could go now: while a request runs, the KV of the other contexts."""
    units = parts.units
    full_bytes = units.snapshot(0).full_bytes
    if units.in_use:
        return ModelMemory(full_bytes=full_bytes, evictable_bytes=units.idle_kv_bytes)
    held_bytes = units.resident_bytes() + parts.payloads.statistics().resident_bytes
    return ModelMemory(full_bytes=full_bytes, evictable_bytes=held_bytes)
