"""The stack of payloads on real memory: it costs what it holds, and shrinks at every release."""

import ctypes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mzd import native
from mzd.errors import MzdError
from mzd.memory import in_memory_swap
from mzd.memory.in_memory_swap import InMemorySwap, free_pages
from mzd.memory.process_memory import read_process_memory
from mzd.policy.units import HUGE_PAGE_BYTES, PAGE_BYTES

KIB = 1024
PAGE = 4 * KIB


def pages(size_bytes):
    return -(-size_bytes // PAGE) * PAGE


def fill(slot, value):
    ctypes.memset(slot.address, value, slot.size_bytes)


def test_push_makes_nothing_resident(resident_bytes):
    slot = InMemorySwap().push(104 * KIB)
    assert resident_bytes(slot.address, slot.size_bytes) == 0


def test_a_written_payload_costs_its_pages_and_no_more(resident_bytes):
    swap = InMemorySwap()
    first = swap.push(104 * KIB + 10)
    fill(first, 1)
    assert resident_bytes(first.address, 1024 * KIB) == 108 * KIB == swap.statistics().resident_bytes
    assert swap.statistics().payload_bytes == 104 * KIB + 10


def test_popped_in_reverse_the_memory_shrinks_at_every_step(resident_bytes):
    swap = InMemorySwap(64 * KIB)
    slots = [swap.push(20 * KIB) for _ in range(12)]
    for slot in slots:
        fill(slot, 7)
    reserved = []
    while slots:
        gone = slots.pop()
        swap.release(gone)
        assert sum(resident_bytes(slot.address, slot.size_bytes) for slot in slots) == len(slots) * 20 * KIB
        assert swap.statistics().resident_bytes == len(slots) * 20 * KIB
        reserved.append(swap.statistics().reserved_bytes)
    assert reserved == sorted(reserved, reverse=True)
    assert reserved[-1] == 0


def test_the_process_gets_its_memory_back():
    swap = InMemorySwap()
    before = read_process_memory().rss_bytes
    slots = [swap.push(100 * KIB) for _ in range(300)]
    for slot in slots:
        fill(slot, 3)
    full = read_process_memory().rss_bytes
    enough_bytes = 295 * 100 * KIB  # of 300: Python and the kernel move some pages of their own
    assert full - before >= enough_bytes
    for slot in slots:
        swap.release(slot)
    assert full - read_process_memory().rss_bytes >= enough_bytes


def test_a_slot_from_the_middle_lets_go_of_its_pages_and_leaves_its_neighbours(resident_bytes):
    swap = InMemorySwap()
    low, middle, high = (swap.push(10 * KIB) for _ in range(3))
    for value, slot in enumerate((low, middle, high)):
        fill(slot, value + 1)
    swap.release(middle)
    assert resident_bytes(middle.address, 10 * KIB) == 0
    assert ctypes.string_at(low.address, 10 * KIB) == b"\1" * 10 * KIB
    assert ctypes.string_at(high.address, 10 * KIB) == b"\3" * 10 * KIB


def test_freed_room_on_top_is_used_again_even_below_an_earlier_hole():
    swap = InMemorySwap(64 * KIB)
    low, middle, high = (swap.push(16 * KIB) for _ in range(3))
    swap.release(middle)
    swap.release(high)
    assert swap.push(16 * KIB).address == middle.address
    assert low.address < middle.address


def test_a_long_payload_gets_a_segment_of_its_own():
    swap = InMemorySwap(64 * KIB)
    slot = swap.push(300 * KIB)
    fill(slot, 1)
    assert swap.statistics().reserved_bytes == 300 * KIB
    swap.release(slot)
    assert swap.statistics().reserved_bytes == 0


def test_releasing_twice_or_elsewhere_is_refused():
    swap, other = InMemorySwap(), InMemorySwap()
    slot, foreign = swap.push(PAGE), other.push(PAGE)
    swap.release(slot)
    for wrong in (slot, foreign):
        with pytest.raises(RuntimeError, match="not in use"):
            swap.release(wrong)


@pytest.mark.parametrize("size", [0, -5])
def test_an_empty_payload_is_refused(size):
    with pytest.raises(ValueError, match="at least one byte"):
        InMemorySwap().push(size)


def test_a_system_that_maps_nothing_is_an_error_with_a_code(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(in_memory_swap.mmap, "mmap", refuse)
    swap = InMemorySwap()
    with pytest.raises(MzdError) as error:
        swap.push(PAGE)
    assert error.value.code == "insufficient_memory"
    assert swap.statistics().num_payloads == 0


class SwapMachine(RuleBasedStateMachine):
    """Any order of push and release: payloads stay what they are and apart from each other."""

    slots = Bundle("slots")

    def __init__(self):
        super().__init__()
        self.swap = InMemorySwap(32 * KIB)
        self.held = {}
        self.next_value = 1

    @rule(target=slots, size=st.integers(1, 50 * KIB))
    def push(self, size):
        slot = self.swap.push(size)
        self.next_value = self.next_value % 255 + 1
        fill(slot, self.next_value)
        self.held[slot] = self.next_value
        return slot

    @rule(slot=consumes(slots))
    def release(self, slot):
        self.swap.release(slot)
        del self.held[slot]

    @invariant()
    def payloads_are_intact(self):
        for slot, value in self.held.items():
            assert slot.address % PAGE == 0
            assert ctypes.string_at(slot.address, slot.size_bytes) == bytes([value]) * slot.size_bytes

    @invariant()
    def statistics_add_up(self):
        statistics = self.swap.statistics()
        assert statistics.num_payloads == len(self.held)
        assert statistics.payload_bytes == sum(slot.size_bytes for slot in self.held)
        assert statistics.resident_bytes == sum(pages(slot.size_bytes) for slot in self.held)
        assert (statistics.reserved_bytes == 0) == (not self.held)


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


def test_detached_pages_go_when_they_are_freed_and_count_no_more_at_once():
    swap = InMemorySwap(segment_bytes=4 * PAGE_BYTES)
    slots = [swap.push(PAGE_BYTES) for _ in range(6)]
    for slot in slots:
        native.fill(slot.address, slot.size_bytes, 1)
    detached = swap.detach([slots[5], slots[4], slots[1]])
    assert swap.statistics().num_payloads == 3
    assert native.resident_bytes(slots[1].address, PAGE_BYTES) == PAGE_BYTES
    free_pages(detached)
    assert native.resident_bytes(slots[1].address, PAGE_BYTES) == 0
    assert native.resident_bytes(slots[0].address, PAGE_BYTES) == PAGE_BYTES
    assert swap.statistics().reserved_bytes == 4 * PAGE_BYTES


def test_a_segment_of_huge_pages_begins_on_one_and_a_released_slot_still_goes():
    swap = InMemorySwap()
    slots = [swap.push(3 * PAGE_BYTES, huge=True) for _ in range(4)]
    assert slots[0].address % HUGE_PAGE_BYTES == 0
    for slot in slots:
        native.fill(slot.address, slot.size_bytes, 7)
    swap.release(slots[1])
    assert native.resident_bytes(slots[1].address, 3 * PAGE_BYTES) == 0
    assert native.resident_bytes(slots[2].address, 3 * PAGE_BYTES) == 3 * PAGE_BYTES
