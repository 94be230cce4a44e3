"""The arena on real memory: what is resident is what is populated, to the page."""

import ctypes
import errno
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mzd.errors import MzdError
from mzd.memory.arena import Arena
from mzd.memory.backend import LeaseError, MemoryBackend
from mzd.memory.huge_pages import has_huge_pages

KIB, MIB = 1024, 1024 * 1024
PAGE, HUGE = 4 * KIB, 2 * MIB
HAS_HUGE_PAGES = has_huge_pages()


class FakeAddressSpace:
    """Reservations that are only numbers, for tests that touch no memory."""

    def __init__(self, limit=1 << 62):
        self.limit = limit
        self.reserved = []

    def __call__(self, size_bytes):
        if len(self.reserved) >= self.limit:
            raise MzdError("insufficient_memory", "the device has no more")
        space = self
        index = len(self.reserved) + 1

        class Numbers:
            address = index * (1 << 40)

            def free(self):
                space.reserved.remove(self)

        numbers = Numbers()
        numbers.size_bytes = size_bytes
        self.reserved.append(numbers)
        return numbers


class FakePages:
    """A kernel that keeps the resident pages as a set, and can be told to refuse."""

    def __init__(self):
        self.resident = set()
        self.refuse_after = None
        self.release_hook = None
        self.lock_error = 0
        self.populate_hook = None

    def populate(self, address, size_bytes, huge):
        if self.populate_hook:
            self.populate_hook(address, size_bytes, huge)
        if self.refuse_after is not None:
            self.refuse_after -= 1
            if self.refuse_after < 0:
                return -errno.ENOMEM
        self.resident |= set(range(address, address + size_bytes, PAGE))
        return 0

    def release(self, address, size_bytes):
        if self.release_hook:
            self.release_hook()
        self.resident -= set(range(address, address + size_bytes, PAGE))
        return 0

    def lock(self, address, size_bytes):
        return self.lock_error

    def unlock(self, address, size_bytes):
        return 0

    @property
    def bytes(self):
        return len(self.resident) * PAGE


def fake_arena(reservation_bytes=16 * MIB, limit=1 << 62, lock_memory=False):
    pages = FakePages()
    space = FakeAddressSpace(limit)
    return Arena(space, reservation_bytes, huge_pages=True, lock_memory=lock_memory, pages=pages), pages


def are_contiguous(leases):
    pairs = pairwise(leases)
    return all(before.address + before.size_bytes == after.address for before, after in pairs)


def test_the_arena_is_a_memory_backend(reserve):
    backend: MemoryBackend = Arena(reserve, 8 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = backend.reserve_run([PAGE, PAGE])
    addresses = np.array([lease.address for lease in leases], np.uint64)
    sizes = np.full(2, PAGE, np.uint64)
    with backend.writing(addresses, sizes) as to_write, backend.reading(addresses, sizes) as to_read:
        assert to_write.tolist() == to_read.tolist() == addresses.tolist()
    backend.release(leases)


def test_a_reservation_costs_nothing_until_it_is_populated(reserve, resident_bytes):
    arena = Arena(reserve, 64 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = arena.reserve_run([3 * MIB + 1, 196 * KIB, 5 * MIB])
    start, size = leases[0].address, sum(lease.size_bytes for lease in leases)
    assert are_contiguous(leases)
    assert resident_bytes(start, size) == 0
    arena.populate(leases)
    assert resident_bytes(start, size) == size == arena.statistics().populated_bytes
    arena.release(leases)
    assert resident_bytes(start, size) == 0 == arena.statistics().leased_bytes


def test_memory_around_a_run_stays_absent(reserve, resident_bytes):
    arena = Arena(reserve, 32 * MIB, huge_pages=HAS_HUGE_PAGES)
    before, unit, after = arena.reserve_run([PAGE, 196 * KIB, PAGE])
    arena.populate([unit])
    assert resident_bytes(unit.address, unit.size_bytes) == 196 * KIB
    assert resident_bytes(before.address, 16 * MIB) == 196 * KIB
    assert after.address == unit.address + unit.size_bytes


def test_backward_out_lets_go_of_exactly_what_is_released(reserve, resident_bytes):
    arena = Arena(reserve, 64 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = arena.reserve_run([1300 * KIB + PAGE] * 12)
    arena.populate(leases)
    start, size = leases[0].address, sum(lease.size_bytes for lease in leases)
    for lease in reversed(leases):
        resident = resident_bytes(start, size)
        arena.release([lease])
        assert resident_bytes(start, size) == resident - lease.size_bytes
        assert arena.statistics().populated_bytes == resident - lease.size_bytes
        assert arena.statistics().num_ranges <= 1


def test_a_released_run_reads_as_zeros_and_is_reused(reserve):
    arena = Arena(reserve, 16 * MIB, huge_pages=HAS_HUGE_PAGES)
    (lease,) = arena.reserve_run([MIB])
    arena.populate([lease])
    ctypes.memset(lease.address, 0xAB, MIB)
    arena.release([lease])
    (again,) = arena.reserve_run([MIB])
    assert again.address == lease.address
    assert ctypes.string_at(again.address, MIB) == bytes(MIB)


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this system has no transparent huge pages")
def test_whole_huge_pages_of_a_run_are_huge_even_in_small_pieces(reserve, huge_bytes, resident_bytes):
    arena = Arena(reserve, 64 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = arena.reserve_run([300 * KIB] * 40)
    populated = 0
    for lease in leases:
        arena.populate([lease])
        populated += lease.size_bytes
        resident = resident_bytes(leases[0].address, 40 * 300 * KIB)
        assert populated <= resident < populated + HUGE
    assert resident == populated
    assert huge_bytes(leases[0].address, populated) == populated // HUGE * HUGE


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this system has no transparent huge pages")
def test_small_units_alone_get_no_huge_pages(reserve, huge_bytes, resident_bytes):
    arena = Arena(reserve, 64 * MIB, huge_pages=HAS_HUGE_PAGES)
    first, _ = (arena.reserve_run([1900 * KIB])[0] for _ in range(2))
    arena.populate([first])
    assert huge_bytes(first.address, HUGE) == 0
    assert resident_bytes(first.address, HUGE) == 1900 * KIB


def test_populating_keeps_what_neighbours_hold(reserve):
    arena = Arena(reserve, 16 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = arena.reserve_run([MIB + PAGE] * 4)
    for i, lease in enumerate(leases):
        arena.populate([lease])
        ctypes.memset(lease.address, i + 1, lease.size_bytes)
    arena.populate(leases)
    for i, lease in enumerate(leases):
        assert ctypes.string_at(lease.address, lease.size_bytes) == bytes([i + 1]) * lease.size_bytes


def test_pieces_in_any_order_and_from_threads_fill_the_run_once(reserve, resident_bytes):
    arena = Arena(reserve, 64 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = arena.reserve_run([700 * KIB] * 32)
    threads = [threading.Thread(target=arena.populate, args=(leases[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    size = 32 * 700 * KIB
    assert resident_bytes(leases[0].address, size) == size == arena.statistics().populated_bytes


def test_a_cancelled_restore_releases_what_was_never_populated(reserve, resident_bytes):
    arena = Arena(reserve, 64 * MIB, huge_pages=HAS_HUGE_PAGES)
    leases = arena.reserve_run([900 * KIB] * 10)
    arena.populate(leases[:3])
    arena.release(leases)
    assert resident_bytes(leases[0].address, 10 * 900 * KIB) == 0
    statistics = arena.statistics()
    assert (statistics.leased_bytes, statistics.populated_bytes, statistics.num_ranges) == (0, 0, 0)
    arena.close()


def test_release_waits_for_a_neighbour_that_is_populating_the_shared_huge_page():
    arena, pages = fake_arena()
    first, second = arena.reserve_run([3 * MIB, 3 * MIB])
    entered, leave = threading.Event(), threading.Event()

    def hold(address, size_bytes, huge):
        if huge:
            entered.set()
            assert leave.wait(10)

    pages.populate_hook = hold
    populating = threading.Thread(target=arena.populate, args=([first],))
    releasing = threading.Thread(target=arena.release, args=([second],))
    populating.start()
    assert entered.wait(10)
    releasing.start()
    releasing.join(0.1)  # a release that does not wait would be over by now
    leave.set()
    populating.join()
    releasing.join()
    assert pages.bytes == first.size_bytes == arena.statistics().populated_bytes


def test_populate_waits_for_the_thread_that_brings_the_shared_huge_page():
    arena, pages = fake_arena()
    first, second = arena.reserve_run([3 * MIB, MIB])
    entered, leave = threading.Event(), threading.Event()
    resident_at_return = []

    def hold(address, size_bytes, huge):
        if huge:
            entered.set()
            assert leave.wait(10)

    def populate_second():
        arena.populate([second])
        resident_at_return.append({second.address, second.address + MIB - PAGE} <= pages.resident)

    pages.populate_hook = hold
    threads = [
        threading.Thread(target=arena.populate, args=([first],)),
        threading.Thread(target=populate_second),
    ]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    threads[1].join(0.1)  # likewise
    leave.set()
    for thread in threads:
        thread.join()
    assert resident_at_return == [True]


def test_a_shared_huge_page_is_not_brought_in_for_a_neighbour_that_is_gone():
    arena, pages = fake_arena()
    first, second, _ = arena.reserve_run([MIB, MIB, 4 * MIB])
    arena.release([second])
    arena.populate([first])
    assert pages.bytes == MIB


def test_a_shared_huge_page_is_not_brought_in_for_a_neighbour_that_is_going():
    arena, pages = fake_arena()
    first, second, _ = arena.reserve_run([MIB, MIB, 4 * MIB])
    pages.release_hook = lambda: arena.populate([first])
    arena.release([second])
    assert pages.bytes == MIB == arena.statistics().populated_bytes


def test_long_runs_start_on_a_huge_page_and_small_ones_fill_the_holes():
    arena, _ = fake_arena()
    (small,) = arena.reserve_run([PAGE])
    (long,) = arena.reserve_run([4 * MIB])
    assert long.address == small.address + HUGE
    assert arena.reserve_run([PAGE])[0].address == small.address + PAGE


def test_a_second_release_is_refused_and_so_is_a_foreign_lease(reserve):
    arena, other = (
        Arena(reserve, 16 * MIB, huge_pages=HAS_HUGE_PAGES),
        Arena(reserve, 16 * MIB, huge_pages=HAS_HUGE_PAGES),
    )
    kept, gone = arena.reserve_run([PAGE, PAGE])
    (foreign,) = other.reserve_run([PAGE])
    arena.release([gone])
    for wrong in ([gone], [kept, gone], [kept, foreign], [kept, kept]):
        with pytest.raises(LeaseError):
            arena.release(wrong)
    with pytest.raises(LeaseError):
        arena.populate([gone])
    arena.reserve_run([PAGE])
    with pytest.raises(LeaseError):
        arena.release([gone])
    assert arena.statistics().leased_bytes == 2 * PAGE


def test_a_full_reservation_is_joined_by_another():
    arena, _ = fake_arena(8 * MIB)
    first = arena.reserve_run([3 * MIB, 3 * MIB])
    assert arena.statistics().reserved_bytes == 8 * MIB
    second = arena.reserve_run([3 * MIB, 3 * MIB])
    assert arena.statistics().reserved_bytes == 16 * MIB
    arena.release(first + second)
    arena.close()
    assert arena.statistics().reserved_bytes == 0


def test_a_run_longer_than_a_reservation_is_split_between_units():
    arena, _ = fake_arena(8 * MIB)
    leases = arena.reserve_run([3 * MIB] * 5)
    assert [lease.size_bytes for lease in leases] == [3 * MIB] * 5
    assert are_contiguous(leases[:2])
    assert are_contiguous(leases[2:4])


def test_fragments_serve_when_the_device_gives_no_more():
    arena, _ = fake_arena(12 * MIB, limit=1)
    leases = arena.reserve_run([2 * MIB] * 6)
    arena.release(leases[1::2])
    again = arena.reserve_run([2 * MIB] * 3)
    assert {lease.address for lease in again} == {lease.address for lease in leases[1::2]}
    with pytest.raises(MzdError, match="no more") as error:
        arena.reserve_run([PAGE])
    assert error.value.code == "insufficient_memory"


def test_a_run_that_fails_half_way_leaves_nothing_reserved():
    arena, _ = fake_arena(12 * MIB, limit=1)
    with pytest.raises(MzdError):
        arena.reserve_run([5 * MIB] * 3)
    assert arena.statistics().leased_bytes == 0
    assert are_contiguous(arena.reserve_run([2 * MIB] * 6))


def test_a_unit_longer_than_the_longest_allocation_is_refused_without_growing():
    arena, _ = fake_arena(8 * MIB)
    with pytest.raises(MzdError) as error:
        arena.reserve_run([PAGE, 8 * MIB])
    assert error.value.data == {"requested_bytes": 8 * MIB, "unit_bytes_max": 4 * MIB}
    assert arena.statistics().reserved_bytes == 0


def test_a_system_without_huge_pages_gets_exactly_what_was_asked_for(reserve, huge_bytes, resident_bytes):
    arena = Arena(reserve, 16 * MIB, huge_pages=False)
    first, _ = arena.reserve_run([5 * MIB, 5 * MIB])
    arena.populate([first])
    assert resident_bytes(first.address, 10 * MIB) == 5 * MIB
    assert huge_bytes(first.address, 10 * MIB) == 0
    assert not arena.statistics().huge_pages


def test_locked_memory_is_locked_while_populated_and_not_longer(reserve, locked_bytes, resident_bytes):
    arena = Arena(reserve, 16 * MIB, huge_pages=HAS_HUGE_PAGES, lock_memory=True)
    kept, gone = arena.reserve_run([3 * PAGE, 5 * PAGE])
    before = locked_bytes()
    arena.populate([kept, gone])
    assert locked_bytes() - before == 8 * PAGE
    arena.release([gone])
    assert locked_bytes() - before == 3 * PAGE
    assert resident_bytes(kept.address, 8 * PAGE) == 3 * PAGE
    arena.release([kept])


def test_a_lock_limit_that_is_too_low_is_said_with_the_figure():
    arena, pages = fake_arena(lock_memory=True)
    first, second = arena.reserve_run([3 * MIB, 3 * MIB])
    arena.populate([first])
    pages.lock_error = -errno.ENOMEM
    with pytest.raises(MzdError, match="RLIMIT_MEMLOCK") as error:
        arena.populate([second])
    assert error.value.data["needed_bytes"] == 6 * MIB
    assert pages.bytes == arena.statistics().populated_bytes < 6 * MIB


def test_a_refused_populate_leaves_the_lease_reserved_and_can_be_repeated():
    arena, pages = fake_arena()
    leases = arena.reserve_run([5 * MIB, 5 * MIB])
    pages.refuse_after = 0
    with pytest.raises(MzdError) as error:
        arena.populate(leases)
    assert error.value.code == "insufficient_memory"
    assert pages.bytes == 0 == arena.statistics().populated_bytes
    pages.refuse_after = None
    arena.populate(leases)
    assert pages.bytes == 10 * MIB


def test_close_refuses_while_a_lease_is_out(reserve):
    arena = Arena(reserve, 8 * MIB, huge_pages=HAS_HUGE_PAGES)
    arena.reserve_run([PAGE])
    with pytest.raises(LeaseError, match="1 leases"):
        arena.close()


@pytest.mark.parametrize("size", [0, -1])
def test_a_unit_without_bytes_is_refused(reserve, size):
    with pytest.raises(ValueError, match="at least one byte"):
        Arena(reserve, 8 * MIB, huge_pages=HAS_HUGE_PAGES).reserve_run([PAGE, size])


class ArenaMachine(RuleBasedStateMachine):
    """Any order of reserve, populate, release: no two leases share a page, no page is resident for nobody."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.arena, self.pages = fake_arena(8 * MIB)
        self.out = {}

    @rule(target=leases, sizes=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=6))
    def reserve(self, sizes):
        made = self.arena.reserve_run(sizes)
        assert [lease.size_bytes for lease in made] == [-(-size // PAGE) * PAGE for size in sizes]
        self.out |= dict.fromkeys(made, False)
        return multiple(*made)

    @rule(chosen=st.lists(leases, max_size=4, unique=True))
    def populate(self, chosen):
        chosen = [lease for lease in chosen if lease in self.out]
        self.arena.populate(chosen)
        self.out |= dict.fromkeys(chosen, True)

    @rule(lease=consumes(leases))
    def release(self, lease):
        self.arena.release([lease])
        del self.out[lease]

    @invariant()
    def leases_are_disjoint(self):
        spans = sorted((lease.address, lease.address + lease.size_bytes) for lease in self.out)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))

    @invariant()
    def free_and_leased_add_up(self):
        leased = sum(lease.size_bytes for lease in self.out)
        statistics = self.arena.statistics()
        assert statistics.leased_bytes == leased
        assert statistics.reserved_bytes == leased + self.arena._free.total

    @invariant()
    def resident_is_what_is_counted_and_belongs_to_somebody(self):
        held = {
            page
            for lease in self.out
            for page in range(lease.address, lease.address + lease.size_bytes, PAGE)
        }
        asked = {
            page
            for lease, populated in self.out.items()
            if populated
            for page in range(lease.address, lease.address + lease.size_bytes, PAGE)
        }
        assert asked <= self.pages.resident <= held
        assert self.pages.bytes == self.arena.statistics().populated_bytes


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


class LimitedAddressSpace(FakeAddressSpace):
    """As under ``ulimit -v``: so many bytes, in pieces of any size."""

    def __init__(self, limit_bytes):
        super().__init__()
        self.left_bytes = limit_bytes

    def __call__(self, size_bytes):
        if size_bytes > self.left_bytes:
            raise MzdError("insufficient_memory", "the device has no room")
        self.left_bytes -= size_bytes
        return super().__call__(size_bytes)


def test_where_addresses_are_limited_shorter_reservations_are_taken():
    space = LimitedAddressSpace(300 * MIB)
    arena = Arena(space, 1024 * MIB, huge_pages=False, pages=FakePages())
    arena.reserve_run([16 * MIB])
    assert [piece.size_bytes for piece in space.reserved] == [256 * MIB]
    arena.reserve_run([230 * MIB])
    assert len(space.reserved) == 1
    arena.reserve_run([16 * MIB])  # the rest has room for it, and for the ends
    assert [piece.size_bytes for piece in space.reserved] == [256 * MIB, 32 * MIB]


def test_no_reservation_is_shorter_than_the_unit_and_the_error_says_what_helps():
    space = LimitedAddressSpace(35 * MIB)
    arena = Arena(space, 1024 * MIB, huge_pages=False, pages=FakePages())
    with pytest.raises(MzdError, match="ulimit -v") as error:
        arena.reserve_run([32 * MIB])
    assert error.value.code == "insufficient_memory"
    space.left_bytes = 36 * MIB
    arena.reserve_run([32 * MIB])
    assert [piece.size_bytes for piece in space.reserved] == [36 * MIB]
