"""The JSON of a result: top level, rows, summary keys, and what may be missing."""

import json

import pytest

from mzd.benchmarks.main import BENCHES, run_benchmark
from mzd.benchmarks.results import SUMMARY_KEYS, BenchResult, ResultError, worst
from mzd.errors import MzdError


def result(**changes):
    fields = {
        "bench": "engine",
        "device": "d",
        "driver": "v",
        "quick": True,
        "synthetic": False,
        "cold": True,
    }
    made = BenchResult(**fields)
    made.rows = [{"system": "a", "time_s": 1.0}]
    made.notes = ["nothing to compare with"]
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_top_level_is_what_scripts_rely_on():
    found = json.loads(json.dumps(result(summary={"ratio_decode": 1.5}).as_map()))
    assert list(found) == [
        "bench", "date", "machine", "device", "driver", "commit", "quick", "synthetic", "cold",
        "ratio_decode", "notes", "rows",
    ]  # fmt: skip
    assert (found["bench"], found["quick"], found["cold"]) == ("engine", True, True)
    assert "cores" in found["machine"]


def test_a_key_of_another_bench_is_refused():
    with pytest.raises(ResultError, match="no key 'ratio_reload'"):
        result(summary={"ratio_reload": 1.0}).as_map()


def test_a_missing_key_needs_a_note():
    with pytest.raises(ResultError, match="lacks 'ratio_prompt512'"):
        result(notes=[]).as_map()


def test_rows_must_have_the_same_columns():
    with pytest.raises(ResultError, match="needs rows"):
        result(rows=[]).as_map()
    with pytest.raises(ResultError, match="different columns"):
        result(rows=[{"a": 1}, {"a": 1, "b": 2}]).as_map()


def test_every_bench_has_its_summary_keys():
    assert set(BENCHES) == set(SUMMARY_KEYS)


def test_an_unknown_bench_is_named_with_those_that_there_are():
    with pytest.raises(MzdError, match="no bench 'nothing'; there are engine"):
        run_benchmark("nothing", quick=True, report=print)


def test_workloads_are_chosen_by_name():
    bench = BENCHES["engine"]
    assert bench.choose(None, quick=False) == bench.choose("all", quick=True) == bench.workloads
    assert bench.choose(None, quick=True) == ("smollm2-135m",)
    assert bench.choose("qwen3-0.6b-f16", quick=True) == ("qwen3-0.6b-f16",)
    assert BENCHES["order"].choose(None, quick=False) == ()


@pytest.mark.parametrize(
    ("name", "workload", "message"),
    [
        ("engine", "x", "no workload 'x'; there are smollm2-135m, .*, all"),
        ("order", "all", "no workload 'all'$"),
    ],
)
def test_an_unknown_workload_is_refused(name, workload, message):
    with pytest.raises(MzdError, match=message):
        run_benchmark(name, quick=True, report=print, workload=workload)


def test_a_summary_over_several_workloads_is_the_worst_of_them():
    found = worst([{"path_imbalance": 0.1, "ratio": 2.0}, {"path_imbalance": 0.3, "ratio": 3.0, "more": 1.0}])
    assert found == {"path_imbalance": 0.3, "ratio": 2.0, "more": 1.0}
