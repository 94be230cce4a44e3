"""When memory is given back because of pressure, and when not: reports from the field as traces."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.policy.pressure import (
    HOG_BYTES_PER_S,
    IDLE_POLL_S,
    POLL_S_MIN,
    PSI_REST_S,
    CgroupReading,
    Level,
    MemoryReading,
    ModelMemory,
    PressurePolicy,
    PressureSnapshot,
    PressureUnknown,
    PsiReading,
    Signal,
    available_and_floor,
    decide,
    next_poll_s,
    pressure_level,
)

MIB = 1024 * 1024
GIB = 1024 * MIB
TOTAL = 8 * GIB
FLOOR = TOTAL // 10
UNKNOWN = PressureUnknown("missing")
CALM = PsiReading(0.0, 0.0, 0, 0)
UNLIMITED = CgroupReading("/", GIB, 0, None)
MODEL = ModelMemory(full_bytes=400 * MIB, evictable_bytes=300 * MIB)
POLICY = PressurePolicy()


def memory(available_bytes, *, swap_free=0.0):
    return MemoryReading(TOTAL, int(available_bytes), 2 * GIB, int(2 * GIB * swap_free))


def snapshot(*, psi=CALM, available=0.6 * TOTAL, cgroup=UNLIMITED, triggered=False, now_s=100.0):
    reading = available if isinstance(available, PressureUnknown) else memory(available)
    return PressureSnapshot(psi, reading, cgroup, triggered, now_s)


def stalled(some=0.0, full=0.0, total_us=10**6):
    return PsiReading(some, full, total_us, total_us)


def decision_on(now, *, before=None, model=MODEL, policy=POLICY, last_evict_s=float("-inf")):
    return decide(now, before or snapshot(), policy, model, last_evict_s=last_evict_s)


# Reports from the field


def test_a_stall_with_plenty_available_is_a_false_alarm():
    """Case: a deduplication job was killed for some avg10=80 while memory and swap were mostly free."""
    decision = decision_on(snapshot(psi=stalled(some=80), available=0.6 * TOTAL))
    assert decision.evict_bytes == 0
    assert decision.signal is Signal.PSI_SOME
    assert "false alarm" in decision.reason


def test_zram_stalls_for_minutes_and_nothing_is_evicted():
    """Case: with zram, PSI stayed above 80 for 159 s with 90 % of memory available."""
    before = None
    for second in range(159):
        now = snapshot(
            psi=stalled(85, 60, total_us=10**6 * (second + 1)), available=0.9 * TOTAL, now_s=second
        )
        assert decision_on(now, before=before).evict_bytes == 0
        before = now


def test_thrash_with_free_swap_is_noticed():
    """Case: only free swap was watched, and full avg10 was high with 80 % of it free."""
    now = replace(snapshot(psi=stalled(full=30)), memory=memory(0.15 * TOTAL, swap_free=0.8))
    decision = decision_on(now)
    assert decision.evict_bytes == 100 * MIB
    assert decision.signal is Signal.PSI_FULL
    assert (decision.threshold, decision.value) == (5.0, 30.0)


def test_the_floor_acts_though_no_stall_was_ever_reported():
    """Case: a PSI daemon never fired before the kernel's OOM killer."""
    decision = decision_on(snapshot(psi=UNKNOWN, available=FLOOR - 1))
    assert decision.evict_bytes == 100 * MIB
    assert decision.signal is Signal.MEM_AVAILABLE
    assert (decision.threshold, decision.value) == (FLOOR, FLOOR - 1)


def test_a_limited_group_acts_by_itself():
    """Case: killed inside memory.max while the machine had memory to spare."""
    group = CgroupReading("/app", 990 * MIB, 20 * MIB, 1000 * MIB)
    decision = decision_on(snapshot(cgroup=group))
    assert decision.signal is Signal.CGROUP
    assert decision.evict_bytes == 100 * MIB
    assert decision.value == 30 * MIB


def test_page_cache_in_a_group_is_not_shortage():
    group = CgroupReading("/app", 990 * MIB, 500 * MIB, 1000 * MIB)
    assert decision_on(snapshot(cgroup=group)).evict_bytes == 0


def test_a_floor_meant_for_the_machine_does_not_empty_a_small_group():
    group = CgroupReading("/app", 300 * MIB, 0, 1000 * MIB)
    assert (
        decision_on(snapshot(cgroup=group), policy=PressurePolicy(floor_bytes=2 * GIB)).signal
        is not Signal.CGROUP
    )


# The rules


def test_nothing_readable_is_not_the_same_as_no_pressure():
    blind = PressureSnapshot(UNKNOWN, UNKNOWN, UNKNOWN, False, 0.0)
    assert decision_on(blind).reason == "nothing can be read"
    assert pressure_level(blind, POLICY) is Level.UNKNOWN
    assert isinstance(available_and_floor(blind, POLICY), PressureUnknown)


def test_a_stall_is_held_where_availability_cannot_be_read():
    now = snapshot(psi=stalled(some=90), available=UNKNOWN)
    decision = decision_on(now)
    assert decision.evict_bytes == 0
    assert "cannot be read" in decision.reason


def test_a_trigger_counts_as_stall_even_where_averages_cannot_be_read():
    now = snapshot(psi=UNKNOWN, available=1.5 * FLOOR, triggered=True)
    assert decision_on(now).signal is Signal.PSI_TRIGGER
    assert decision_on(now).evict_bytes == 100 * MIB


def test_an_average_that_only_decays_is_the_past():
    before = snapshot(psi=stalled(some=50), available=1.5 * FLOOR)
    assert decision_on(before).evict_bytes
    assert decision_on(replace(before, now_s=101.0), before=before).signal is Signal.NONE


def test_stall_rests_after_an_eviction_but_the_floor_does_not():
    now = snapshot(psi=stalled(some=50), available=1.5 * FLOOR, now_s=100.0)
    assert decision_on(now, last_evict_s=100.0 - PSI_REST_S / 2).evict_bytes == 0
    assert decision_on(now, last_evict_s=100.0 - PSI_REST_S).evict_bytes
    below = replace(now, memory=memory(FLOOR / 2))
    assert decision_on(below, last_evict_s=99.99).evict_bytes


def test_nothing_is_asked_of_a_model_that_has_nothing_to_give():
    empty = replace(MODEL, evictable_bytes=0)
    assert decision_on(snapshot(available=0), model=empty).evict_bytes == 0
    assert decision_on(snapshot(psi=stalled(some=90), available=1.5 * FLOOR), model=empty).evict_bytes == 0


def test_the_shortfall_is_asked_for_where_it_exceeds_a_step():
    assert decision_on(snapshot(available=FLOOR - 200 * MIB)).evict_bytes == 200 * MIB


def test_of_two_places_below_their_floors_the_shorter_one_decides():
    group = CgroupReading("/app", 1000 * MIB, 0, 1000 * MIB)
    decision = decision_on(snapshot(available=FLOOR - 90 * MIB, cgroup=group))
    assert decision.signal is Signal.CGROUP


@given(
    psi=st.one_of(
        st.just(UNKNOWN),
        st.builds(
            PsiReading, st.floats(0, 100), st.floats(0, 100), st.integers(0, 10**12), st.integers(0, 10**12)
        ),
    ),
    available=st.integers(2 * FLOOR + 1, TOTAL),
    triggered=st.booleans(),
)
def test_no_stall_whatever_evicts_while_two_floors_are_available(psi, available, triggered):
    assert decision_on(snapshot(psi=psi, available=available, triggered=triggered)).evict_bytes == 0


@given(available=st.integers(0, FLOOR - 1), psi=st.sampled_from((CALM, UNKNOWN)))
def test_below_the_floor_always_evicts_at_least_the_shortfall(available, psi):
    decision = decision_on(snapshot(psi=psi, available=available))
    assert decision.evict_bytes >= FLOOR - available
    assert decision == decision_on(snapshot(psi=psi, available=available))


@pytest.mark.parametrize(
    ("available", "level"), [(FLOOR - 1, Level.CRITICAL), (FLOOR, Level.LOW), (2 * FLOOR, Level.NONE)]
)
def test_levels(available, level):
    assert pressure_level(snapshot(available=available), POLICY) is level


def test_the_default_floor_is_a_tenth_and_bounded_on_large_machines():
    assert POLICY.floor_of(4 * GIB) == 4 * GIB // 10
    assert POLICY.floor_of(64 * GIB) == GIB
    assert PressurePolicy(floor_bytes=5).floor_of(64 * GIB) == 5


@given(available=st.integers(0, TOTAL))
def test_a_hog_cannot_run_far_past_the_floor_between_two_polls(available):
    wait_s = next_poll_s(snapshot(available=available), POLICY, MODEL)
    assert POLL_S_MIN <= wait_s <= POLICY.poll_s
    left = available - wait_s * HOG_BYTES_PER_S
    assert available < FLOOR or left >= FLOOR - POLL_S_MIN * HOG_BYTES_PER_S - 1


def test_polls_are_rare_while_nothing_is_evictable():
    assert next_poll_s(snapshot(available=0), POLICY, replace(MODEL, evictable_bytes=0)) == IDLE_POLL_S
