"""The account adds up, and refuses what cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.memory.ledger import Ledger, MemoryKind

kinds = st.sampled_from(MemoryKind)


@given(st.lists(st.tuples(kinds, st.integers(0, 1 << 40), st.integers(0, 1 << 40))))
def test_total_is_the_sum_of_what_came_and_went(changes):
    ledger, expected = Ledger(), dict.fromkeys(MemoryKind, 0)
    for kind, added, removed in changes:
        ledger.add(kind, added)
        ledger.remove(kind, min(removed, added))
        expected[kind] += added - min(removed, added)
    snapshot = ledger.snapshot()
    assert {kind: snapshot[kind] for kind in MemoryKind} == expected
    assert snapshot.total_bytes == sum(expected.values())


def test_a_snapshot_is_frozen():
    ledger = Ledger()
    ledger.add(MemoryKind.KV, 100)
    snapshot = ledger.snapshot()
    ledger.add(MemoryKind.KV, 1)
    assert snapshot[MemoryKind.KV] == 100
    with pytest.raises(TypeError):
        snapshot.kinds[MemoryKind.KV] = 7


@pytest.mark.parametrize("size", [-1, 101])
def test_removing_more_than_there_is_is_refused(size):
    ledger = Ledger()
    ledger.add(MemoryKind.WEIGHTS, 100)
    with pytest.raises(ValueError, match="cannot remove"):
        ledger.remove(MemoryKind.WEIGHTS, size)


def test_negative_figures_are_refused():
    with pytest.raises(ValueError, match="cannot add"):
        Ledger().add(MemoryKind.HEAD, -1)
    with pytest.raises(ValueError, match="no number"):
        Ledger().set(MemoryKind.SCRATCH, -1)


def test_fields_carry_units_and_every_kind():
    ledger = Ledger()
    ledger.set(MemoryKind.BASELINE, 70)
    ledger.set(MemoryKind.BASELINE, 80)
    fields = ledger.snapshot().fields()
    assert fields["baseline_bytes"] == fields["total_bytes"] == 80
    assert len(fields) == len(MemoryKind) + 1


@pytest.mark.parametrize(("kernel_bytes", "drift"), [(100, 0.0), (80, 0.25), (200, -0.5)])
def test_drift_says_who_claims_more(kernel_bytes, drift):
    ledger = Ledger()
    ledger.add(MemoryKind.KV, 60)
    ledger.add(MemoryKind.SCRATCH, 40)
    assert ledger.snapshot().drift(kernel_bytes) == drift


def test_drift_against_nothing_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        Ledger().snapshot().drift(0)
