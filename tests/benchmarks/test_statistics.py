"""Medians, spread, ratios, and the order in which contestants are measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.benchmarks import statistics
from mzd.benchmarks.statistics import Series, interleave, ratio, series_by

values = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20)


@given(values)
def test_a_series_lies_within_its_measurements(found):
    series = Series(tuple(found))
    assert min(found) <= series.median <= max(found)
    assert series.spread == max(found) - min(found)


@given(values)
def test_the_order_of_rounds_does_not_matter(found):
    assert Series(tuple(found)).fields("t") == Series(tuple(reversed(found))).fields("t")


def test_one_slow_round_does_not_move_the_median():
    assert Series((1.0, 1.0, 50.0)).fields("time") == {"time_s": 1.0, "time_spread_s": 49.0}


def test_an_empty_series_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Series(())


def test_a_ratio_says_how_many_times_longer_the_first_takes():
    assert ratio(Series((4.0,)), Series((2.0,))) == 2.0
    with pytest.raises(ValueError, match="zero"):
        ratio(Series((4.0,)), Series((0.0,)))


async def test_contestants_take_turns(monkeypatch):
    monkeypatch.setattr(statistics, "SETTLE_S", 0.0)
    calls = []

    def contestant(name):
        async def measure():
            calls.append(name)
            return float(len(calls))

        return measure

    measured = await interleave({"a": contestant("a"), "b": contestant("b")}, 2)
    assert calls == ["a", "b"] * 3
    assert measured["a"].values == (3.0, 5.0)  # the warm-up is not counted
    assert measured["b"].values == (4.0, 6.0)


def test_series_by_quantity():
    found = series_by(("a", "b"), [{"a": 1.0, "b": 2.0, "c": 9.0}, {"a": 3.0, "b": 4.0, "c": 9.0}])
    assert found == {"a": Series((1.0, 3.0)), "b": Series((2.0, 4.0))}
