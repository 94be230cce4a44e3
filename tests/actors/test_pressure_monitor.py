"""The monitor on fake probes and a fake allocator, in virtual time."""

import logging
from dataclasses import dataclass, field, replace

import pytest
import trio

from mzd.actors.pressure_monitor import BARREN_REST_S, PressureMonitor
from mzd.errors import MzdError
from mzd.memory.pressure_triggers import TriggerGoneError
from mzd.messages.evict_path import Evict, EvictOutcome
from mzd.policy.pressure import (
    IDLE_POLL_S,
    CgroupReading,
    Level,
    MemoryReading,
    ModelMemory,
    PressurePolicy,
    PressureUnknown,
    PsiReading,
    Signal,
)

MIB = 1024 * 1024
TOTAL = 8000 * MIB
FLOOR = 800 * MIB
POLICY = PressurePolicy()


@dataclass
class FakeMachine:
    """Probes, model and allocator in one: what is evicted becomes available."""

    available_bytes: int = 6000 * MIB
    resident_bytes: int = 400 * MIB
    psi_reading: PsiReading | PressureUnknown = field(default_factory=lambda: PsiReading(0, 0, 0, 0))
    num_looks: int = 0
    asked: list[Evict] = field(default_factory=list)
    was_asked: trio.Event = field(default_factory=trio.Event)

    def psi(self):
        return self.psi_reading

    def memory(self):
        self.num_looks += 1
        return MemoryReading(TOTAL, self.available_bytes, 0, 0)

    def cgroup_memory(self):
        return CgroupReading("/", 0, 0, None)

    def model(self):
        return ModelMemory(400 * MIB, self.resident_bytes)

    async def serve(self, evictions, *, takes_s=0.0):
        async with evictions:
            async for evict in evictions:
                self.asked.append(evict)
                self.was_asked.set()
                await trio.sleep(takes_s)
                freed_bytes = min(evict.goal_bytes, self.resident_bytes)
                self.resident_bytes -= freed_bytes
                self.available_bytes += freed_bytes
                evict.reply.set(outcome(evict.goal_bytes, freed_bytes, self.resident_bytes))


def outcome(requested, freed, resident):
    return EvictOutcome(requested, freed, resident, freed < requested, (), ())


class FakeTrigger:
    source = "fake"

    def __init__(self):
        self.send, self._receive = trio.open_memory_channel(10)
        self.closed = False

    async def wait(self):
        try:
            await self._receive.receive()
        except trio.EndOfChannel:
            raise TriggerGoneError(self.source) from None

    def close(self):
        self.closed = True
        self._receive.close()
        self.send.close()


def monitor_of(machine, evictions, *triggers):
    return PressureMonitor(machine, triggers, POLICY, machine.model, evictions)


@pytest.fixture
def machine():
    return FakeMachine()


@pytest.fixture
def channel():
    return trio.open_memory_channel(0)


async def test_a_crossed_floor_is_answered_once_and_then_it_is_quiet(
    machine, channel, nursery, autojump_clock
):
    send, receive = channel
    nursery.start_soon(machine.serve, receive)
    await nursery.start(monitor_of(machine, send).run)
    machine.available_bytes = FLOOR - 30 * MIB
    await trio.sleep(5)
    (evict,) = machine.asked
    assert evict.goal_bytes == 100 * MIB
    assert evict.reason.startswith("mem_available: ")
    assert not evict.dry_run
    assert evict.context is None


async def test_a_fast_hog_is_met_within_a_fifth_of_a_second(machine, channel, nursery, autojump_clock):
    """Case: a fast spike that a timer does not catch. Near the floor, looks come more often."""
    send, receive = channel
    nursery.start_soon(machine.serve, receive)
    await nursery.start(monitor_of(machine, send).run)
    machine.available_bytes = FLOOR + 1
    await trio.sleep(1)
    crossed_s = trio.current_time()
    machine.available_bytes = FLOOR - 1
    await machine.was_asked.wait()
    assert trio.current_time() - crossed_s < 0.2


async def test_one_shortage_is_not_answered_twice_while_the_allocator_is_at_work(
    machine, channel, nursery, autojump_clock
):
    send, receive = channel
    machine.available_bytes = FLOOR - 30 * MIB
    nursery.start_soon(lambda: machine.serve(receive, takes_s=3.0))
    await nursery.start(monitor_of(machine, send).run)
    await trio.sleep(10)
    assert len(machine.asked) == 1


async def test_a_trigger_wakes_the_monitor_at_once(machine, channel, nursery, autojump_clock):
    send, receive = channel
    trigger = FakeTrigger()
    machine.available_bytes = 2 * FLOOR - 1
    machine.psi_reading = PressureUnknown("no psi")
    nursery.start_soon(machine.serve, receive)
    await nursery.start(monitor_of(machine, send, trigger).run)
    await trio.testing.wait_all_tasks_blocked()
    start_s = trio.current_time()
    trigger.send.send_nowait(None)
    await machine.was_asked.wait()
    assert trio.current_time() == pytest.approx(start_s)
    assert machine.asked[0].reason.startswith("psi_trigger: ")


async def test_a_trigger_that_goes_away_leaves_the_polls(machine, channel, nursery, autojump_clock, caplog):
    send, receive = channel
    trigger = FakeTrigger()
    nursery.start_soon(machine.serve, receive)
    await nursery.start(monitor_of(machine, send, trigger).run)
    trigger.send.close()
    await trio.sleep(1)
    machine.available_bytes = FLOOR - 1
    await trio.sleep(1)
    assert len(machine.asked) == 1
    assert "trigger gone" in caplog.text


async def test_false_alarms_evict_nothing_and_are_said_once(
    machine, channel, nursery, autojump_clock, caplog
):
    caplog.set_level(logging.INFO)
    send, receive = channel
    nursery.start_soon(machine.serve, receive)
    monitor = monitor_of(machine, send)
    await nursery.start(monitor.run)
    for second in range(1, 160):
        machine.psi_reading = PsiReading(85.0, 60.0, second * 10**6, second * 10**6)
        await trio.sleep(1)
    assert machine.asked == []
    lines = [r.getMessage() for r in caplog.records if "no eviction" in r.getMessage()]
    assert len(lines) == 1
    assert "signal=psi_full" in lines[0]
    assert "false alarm" in lines[0]
    assert monitor.statistics().last_decision.signal is Signal.PSI_FULL


async def test_each_eviction_is_logged_with_all_that_an_administrator_asks(
    machine, channel, nursery, autojump_clock, caplog
):
    caplog.set_level(logging.INFO)
    send, receive = channel
    machine.available_bytes = FLOOR - 30 * MIB
    nursery.start_soon(lambda: machine.serve(receive, takes_s=0.5))
    await nursery.start(monitor_of(machine, send).run)
    await trio.sleep(5)
    (line,) = [r.getMessage() for r in caplog.records if "evicted for pressure" in r.getMessage()]
    for part in (
        "signal=mem_available",
        "threshold=",
        "value=",
        f"asked_bytes={100 * MIB}",
        f"freed_bytes={100 * MIB}",
    ):
        assert part in line
    assert "duration_s=0.5" in line


async def test_a_refused_eviction_is_not_repeated_at_every_poll(
    machine, channel, nursery, autojump_clock, caplog
):
    caplog.set_level(logging.INFO)
    send, receive = channel
    machine.available_bytes = FLOOR - 30 * MIB
    refused_s = []

    async def refuse():
        async for evict in receive:
            refused_s.append(trio.current_time())
            evict.reply.fail(MzdError("swap_full", "nothing could be freed"))

    nursery.start_soon(refuse)
    monitor = monitor_of(machine, send)
    await nursery.start(monitor.run)
    await trio.sleep(10.5 * BARREN_REST_S)
    assert len(refused_s) == 11
    assert "error=swap_full" in caplog.text
    before = len(refused_s)
    monitor.look_now()
    await trio.testing.wait_all_tasks_blocked()
    assert len(refused_s) == before + 1


async def test_looks_are_rare_while_nothing_can_be_evicted(machine, channel, nursery, autojump_clock):
    send, receive = channel
    machine.resident_bytes = 0
    nursery.start_soon(machine.serve, receive)
    monitor = monitor_of(machine, send)
    await nursery.start(monitor.run)
    before = machine.num_looks
    await trio.sleep(60)
    assert machine.num_looks - before <= 60 / IDLE_POLL_S + 1
    machine.resident_bytes = 400 * MIB
    machine.available_bytes = FLOOR - 1
    monitor.look_now()
    await trio.testing.wait_all_tasks_blocked()
    assert len(machine.asked) == 1


async def test_missing_psi_is_said_once(machine, channel, nursery, autojump_clock, caplog):
    send, receive = channel
    machine.psi_reading = PressureUnknown("no file; boot with psi=1")
    nursery.start_soon(machine.serve, receive)
    monitor = monitor_of(machine, send)
    await nursery.start(monitor.run)
    await trio.sleep(30)
    assert [r.getMessage() for r in caplog.records if "psi=1" in r.getMessage()] == [
        "pressure source missing: source=psi reason=no file; boot with psi=1"
    ]
    assert monitor.statistics().source == "meminfo"


async def test_statistics_are_frozen_and_follow_the_last_look(machine, channel, nursery, autojump_clock):
    send, receive = channel
    monitor = monitor_of(machine, send)
    before = monitor.statistics()
    assert (before.source, before.level, before.available_bytes) == ("none", Level.UNKNOWN, None)
    nursery.start_soon(machine.serve, receive)
    await nursery.start(monitor.run)
    await trio.testing.wait_all_tasks_blocked()
    now = monitor.statistics()
    assert now == replace(now, source="psi+meminfo", level=Level.NONE, last_decision=None)
    assert (now.available_bytes, now.floor_bytes) == (6000 * MIB, FLOOR)


async def test_cancelled_it_closes_its_channel_and_the_triggers(machine, channel, autojump_clock):
    send, receive = channel
    trigger = FakeTrigger()
    machine.available_bytes = FLOOR - 1
    async with trio.open_nursery() as nursery:
        await nursery.start(monitor_of(machine, send, trigger).run)
        evict = await receive.receive()
        nursery.cancel_scope.cancel()
    assert trigger.closed
    evict.reply.set(outcome(1, 1, 0))
    with pytest.raises(trio.EndOfChannel):
        receive.receive_nowait()


async def test_it_ends_when_the_allocator_has_closed_its_inbox(machine, channel, autojump_clock):
    send, receive = channel
    trigger = FakeTrigger()
    receive.close()
    machine.available_bytes = FLOOR - 1
    with trio.fail_after(5):
        await monitor_of(machine, send, trigger).run()
    assert trigger.closed
