"""The set of ranges against a plain set of integers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.memory.range_set import RangeSet

PLACES = 24
spans = st.tuples(st.integers(0, PLACES), st.integers(0, PLACES)).map(sorted).filter(lambda s: s[0] < s[1])


def places(ranges):
    return {place for low, high in ranges for place in range(low, high)}


@given(st.lists(st.tuples(st.booleans(), spans)), spans)
def test_behaves_like_a_set_of_places(changes, probe):
    ranges, model = RangeSet(), set()
    for is_add, (low, high) in changes:
        span = set(range(low, high))
        if not is_add:
            assert ranges.discard(low, high) == len(model & span)
            model -= span
        elif model & span:
            with pytest.raises(ValueError, match="already"):
                ranges.add(low, high)
        else:
            ranges.add(low, high)
            model |= span
        assert places(ranges) == model
        assert ranges.total == len(model)
    span = set(range(*probe))
    assert places(ranges.covered(*probe)) == model & span
    assert places(ranges.gaps(*probe)) == span - model
    assert ranges.overlaps(*probe) == bool(model & span)


@given(st.lists(spans))
def test_ranges_never_touch(changes):
    ranges = RangeSet()
    for low, high in changes:
        for gap in ranges.gaps(low, high):
            ranges.add(*gap)
    listed = list(ranges)
    assert all(before[1] < after[0] for before, after in pairwise(listed))
    assert len(ranges) == len(listed)


@given(st.lists(spans), st.integers(1, PLACES))
def test_best_fit_is_the_smallest_that_fits(changes, size):
    ranges = RangeSet()
    for low, high in changes:
        for gap in ranges.gaps(low, high):
            ranges.add(*gap)
    fitting = sorted((high - low, low) for low, high in ranges if high - low >= size)
    best = ranges.best_fit(size)
    assert (best is None) == (not fitting)
    if best is not None:
        assert (best[1] - best[0], best[0]) == fitting[0]
    largest = ranges.largest()
    assert (largest is None) == (len(ranges) == 0)


def test_an_empty_range_is_refused():
    with pytest.raises(ValueError, match="empty"):
        RangeSet().add(4, 4)
