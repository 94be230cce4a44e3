"""Owns the daemon's life: start, readiness, signals, the orderly end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np
import trio

from mzd.actors.allocator import AllocatorSettings
from mzd.daemon.assembly import Opened, activations_of, open_everything
from mzd.daemon.config import Config
from mzd.daemon.conversations import Conversation, Conversations, since_wall_time
from mzd.daemon.notify import ServiceManager, handed_over_sockets
from mzd.daemon.pressure import monitor_factory
from mzd.daemon.profiling import load_or_measure, subject_of
from mzd.daemon.service import Service
from mzd.daemon.start_clock import StartClock
from mzd.daemon.status import StatusReporter
from mzd.daemon.trace import TraceBook
from mzd.daemon.turnstile import Turnstile
from mzd.daemon.wiring import System, wire
from mzd.errors import MzdError
from mzd.memory.context_archive import ContextArchive
from mzd.memory.unit_table import UnitTable
from mzd.memory.workers import Workers
from mzd.messages.evict_path import Evict, EvictOutcome
from mzd.messages.reply import Reply
from mzd.policy.eviction_planner import Order
from mzd.policy.profile import DeviceProfile, unit_times
from mzd.rpc.endpoint import bind_socket, free_socket_path
from mzd.rpc.limits import Limits
from mzd.rpc.peers import PeerPolicy, group_id
from mzd.rpc.server import RpcServer

log = logging.getLogger(__name__)

START_LIMIT_US = 600_000_000
"""What the service manager is asked to wait for the first start."""

SAVE_DEADLINE_S = 20.0
"""How long the end may take to bring contexts to flash; a service manager waits 90 s by default."""


def run_daemon(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then end in order.

    Raises:
        MzdError: why the daemon cannot start, or cannot go on.
    """
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        trio.run(_main, config)
    except* MzdError as group:
        refused = _leaves(group)
    else:
        return
    raise refused[0]


def _leaves(group: BaseExceptionGroup[MzdError]) -> list[MzdError]:
    """The errors of a group of groups."""
    found: list[MzdError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


async def _main(config: Config) -> None:
    manager = ServiceManager()
    clock = StartClock()
    given = list(handed_over_sockets())
    if not given:
        free_socket_path(config.socket_path)  # or it is busy, which minutes of compiling would not change
    # A first start imports the model and compiles the kernels: minutes on a small board.
    manager.tell("STATUS=opening the model and the device", f"EXTEND_TIMEOUT_USEC={START_LIMIT_US}")
    async with open_everything(config, clock) as opened:
        # Before any actor runs: nothing may take cores from it, nor it from a request.
        profile = await load_or_measure(subject_of(config, opened.device, opened.parts.store))
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                with clock.part("contexts"):
                    daemon = _make_daemon(config, opened, profile)
                for run in daemon.system.runs:
                    nursery.start_soon(run)
                nursery.start_soon(manager.run_watchdog)
                await _serve(daemon, manager, signals, lambda: _listeners(config, given), clock)
                await _save(daemon.system)
                await daemon.system.aclose()
                nursery.cancel_scope.cancel()  # whoever still waits: the pressure monitor, the watchdog


@dataclass(slots=True)
class _Daemon:
    """The parts that the daemon's life is made of."""

    system: System
    server: RpcServer
    reporter: StatusReporter


def _make_daemon(config: Config, opened: Opened, profile: DeviceProfile) -> _Daemon:
    parts, index = opened.parts, opened.parts.store.index
    settings = AllocatorSettings(
        restore_wait_s=config.restore_wait_s,
        eviction_order=Order(config.eviction_order),
        times=unit_times(
            profile,
            chunk_bytes=parts.units.kv_sizes.chunk_bytes,
            layer_bytes=float(np.mean([extent.size_bytes for extent in index.layers])),
        ),
    )
    monitor = monitor_factory(config.pressure, parts) if config.pressure.enabled else None
    system = wire(parts, config, settings, monitor)
    archive = ContextArchive(
        opened.contexts,
        parts.storage,
        Workers("archive", 1),
        model_id=index.model_id,
        codec_name=parts.codec.name,
        codec_version=parts.codec.version,
    )
    conversations = _revived(archive, parts.units, config.limits.contexts)
    reporter = _reporter(config, opened, system, archive, conversations, profile)
    service = _service(config, opened, system, archive, conversations, reporter)
    limits = Limits(frame_bytes_max=config.limits.frame_bytes, connections_max=config.limits.connections)
    server = RpcServer(service.methods(), allowed=PeerPolicy.same_user(config.socket_group), limits=limits)
    return _Daemon(system, server, reporter)


def _revived(archive: ContextArchive, units: UnitTable, limit: int) -> Conversations:
    """Conversations of earlier runs: known by name, their KV on flash until somebody asks."""
    conversations = Conversations(limit, check_name=archive.check_usable)
    for found in archive.revive(len(units.weights)):
        found.cache.last_used_s = since_wall_time(found.written_s)
        if len(found.cache.tokens):
            units.caches[found.name] = found.cache
        # The last token of a log was sampled and never computed; everything before it was.
        conversations.adopt(
            Conversation(
                found.name,
                found.tokens.tolist(),
                computed=len(found.cache.tokens),
                once_computed=max(len(found.cache.tokens), len(found.tokens) - 1),
                last_used_s=found.cache.last_used_s,
            )
        )
    return conversations


def _reporter(
    config: Config,
    opened: Opened,
    system: System,
    archive: ContextArchive,
    conversations: Conversations,
    profile: DeviceProfile,
) -> StatusReporter:
    return StatusReporter(
        allocator=system.allocator,
        memory=opened.parts.memory,
        staging=opened.parts.staging,
        engine=opened.parts.engine,
        chosen=opened.chosen,
        store=opened.parts.store,
        conversations=conversations,
        archive=archive,
        turnstile=Turnstile(config.limits.waiting),
        pressure=system.monitor,
        profile=profile,
        context_length=opened.context_length,
        baseline=opened.parts.baseline,
        activations=activations_of(config, opened.device),
        store_bytes=opened.store_bytes,
        quota_bytes=config.swap.quota_bytes,
    )


def _service(
    config: Config,
    opened: Opened,
    system: System,
    archive: ContextArchive,
    conversations: Conversations,
    reporter: StatusReporter,
) -> Service:
    return Service(
        compute=system.compute,
        allocator=system.to_allocator,
        tokenizer=opened.text.tokenizer,
        template=opened.text.template,
        conversations=conversations,
        archive=archive,
        turnstile=reporter.turnstile,
        status_reporter=reporter,
        context_length=opened.context_length,
        traces=TraceBook(system.allocator, system.gpu),
    )


async def _serve(
    daemon: _Daemon,
    manager: ServiceManager,
    signals: AsyncIterator[int],
    listen: Callable[[], list[trio.SocketListener]],
    clock: StartClock,
) -> None:
    """Answer clients until a signal comes; then end every connection with a word."""
    listeners = listen()
    async with trio.open_nursery() as nursery:
        await nursery.start(daemon.server.serve, listeners)
        daemon.reporter.ready_s = clock.ready()
        manager.tell("READY=1", "STATUS=ready")
        print("ready", file=sys.stderr, flush=True)
        async for number in signals:
            log.info("ending: signal=%s", signal.Signals(number).name)
            break
        manager.tell("STOPPING=1", "STATUS=bringing contexts to flash")
        daemon.server.stop()


def _listeners(config: Config, given: list[socket.socket]) -> list[trio.SocketListener]:
    if not given:
        gid = group_id(config.socket_group) if config.socket_group else None
        given = [bind_socket(config.socket_path, gid=gid)]
    for listener in given:
        listener.setblocking(False)
    return [trio.SocketListener(trio.socket.from_stdlib_socket(listener)) for listener in given]


async def _save(system: System) -> None:
    """Bring every context to flash, as the same eviction would under pressure: the next start finds it."""
    reply: Reply[EvictOutcome] = Reply()
    with trio.move_on_after(SAVE_DEADLINE_S):
        everything = system.allocator.snapshot().full_bytes
        await system.to_allocator.send(Evict(everything, "end of the daemon", False, None, reply))
        await reply.get()
