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
from mzd.policy.pressure import ModelMemory


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
        policy=config.policy(),
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
