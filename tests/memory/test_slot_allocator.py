"""Places in a swap file: apart from each other, side by side within a layer, used again."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mzd.memory.slot_allocator import REGION_CHUNKS, SlotAllocator, SwapSlot

PAGE = 4096


@given(st.permutations(range(REGION_CHUNKS)), st.integers(1, 3))
def test_consecutive_chunks_of_a_layer_are_neighbours_in_whatever_order_they_come(order, pages):
    allocator = SlotAllocator()
    slots = {}
    for chunk in order:
        for layer in (2, 1, 0):
            slots[layer, chunk] = allocator.allocate(layer, chunk, pages * PAGE)
    for layer in range(3):
        offsets = [slots[layer, chunk].offset_bytes for chunk in range(REGION_CHUNKS)]
        assert offsets == list(range(offsets[0], offsets[0] + REGION_CHUNKS * pages * PAGE, pages * PAGE))


def test_a_new_copy_lies_apart_from_the_one_that_still_counts():
    allocator = SlotAllocator()
    old = allocator.allocate(0, 5, PAGE)
    new = allocator.allocate(0, 5, PAGE)
    assert new.offset_bytes != old.offset_bytes
    allocator.free(old)
    assert allocator.allocate(0, 5, PAGE) == old


def test_the_space_of_an_emptied_region_serves_another_size():
    allocator = SlotAllocator()
    slot = allocator.allocate(0, 0, 4 * PAGE)
    end = allocator.end_bytes
    allocator.free(slot)
    for layer in range(4):
        allocator.allocate(layer, 0, PAGE)
    assert allocator.end_bytes == end


def test_adopting_refuses_what_overlaps_and_what_cannot_be():
    allocator = SlotAllocator()
    assert allocator.adopt(SwapSlot(0, 1, PAGE, PAGE))
    assert not allocator.adopt(SwapSlot(0, 1, PAGE, PAGE))
    assert not allocator.adopt(SwapSlot(1, 1, PAGE, PAGE))
    assert not allocator.adopt(SwapSlot(1, 1, 2 * PAGE, PAGE))
    assert not allocator.adopt(SwapSlot(1, 5, 0, PAGE))
    assert not allocator.adopt(SwapSlot(1, 0, 1 << 20, 0))
    assert allocator.adopt(SwapSlot(0, 2, 2 * PAGE, PAGE))
    assert allocator.adopt(SwapSlot(1, 0, 1 << 20, PAGE))
    fresh = allocator.allocate(2, 0, PAGE)
    assert REGION_CHUNKS * PAGE <= fresh.offset_bytes < 1 << 20


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocate and free, for two slot sizes."""

    slots = Bundle("slots")

    def __init__(self):
        super().__init__()
        self.allocator = SlotAllocator()
        self.held = []

    @rule(
        target=slots,
        layer=st.integers(0, 2),
        chunk=st.integers(0, 40),
        size=st.sampled_from([PAGE, 3 * PAGE]),
    )
    def allocate(self, layer, chunk, size):
        slot = self.allocator.allocate(layer, chunk, size)
        assert (slot.layer, slot.chunk, slot.slot_bytes) == (layer, chunk, size)
        self.held.append(slot)
        return slot

    @rule(slot=consumes(slots))
    def free(self, slot):
        self.allocator.free(slot)
        self.held.remove(slot)

    @rule()
    def replay(self):
        self.allocator = SlotAllocator()
        assert all(self.allocator.adopt(slot) for slot in reversed(self.held))

    @invariant()
    def slots_are_disjoint_and_inside(self):
        spans = sorted((slot.offset_bytes, slot.offset_bytes + slot.slot_bytes) for slot in self.held)
        at = 0
        for start, end in spans:
            assert at <= start
            at = end
        assert at <= self.allocator.end_bytes


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
