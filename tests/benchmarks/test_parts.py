"""The pure parts: stages of a trace, the bound, paths, cases, synthetic models, pictures."""

import numpy as np
import pytest

from mzd.benchmarks.daemon_harness import Asked
from mzd.benchmarks.engine_cases import (
    Case,
    case_row,
    common_prefix,
    engine_cases,
    random_tokens,
)
from mzd.benchmarks.environment import commit_name, machine_name
from mzd.benchmarks.kv_pattern import draw_chunks, lay_out, row_addresses
from mzd.benchmarks.llama_peer import import_binding
from mzd.benchmarks.picture import PLOTS, group_name
from mzd.benchmarks.results import SUMMARY_KEYS
from mzd.benchmarks.stages import Throughputs, stages_of
from mzd.benchmarks.statistics import Series
from mzd.benchmarks.swap import path_summary
from mzd.benchmarks.synthetic import GEOMETRIES, Geometry, write_model
from mzd.codec import codec_by_name
from mzd.memory.restore_trace import RestoreTrace
from mzd.model.importer import import_gguf
from mzd.model.weight_store import WeightStore

MS = 1_000_000


@pytest.fixture
def trace():
    """Allocation for 2 ms, then both paths for 5 ms and 3 ms."""
    trace = RestoreTrace(1)
    trace.add("allocate", None, 0, 2 * MS, 900)
    trace.add("read", 0, 2 * MS, 7 * MS, 600)
    trace.add("decompress", 0, 3 * MS, 6 * MS, 400)
    return trace


def asked(trace):
    return Asked(0.011, np.zeros(1, np.float32), trace, 11 * MS)


def test_stages_end_where_the_next_one_begins(trace):
    stages = stages_of(asked(trace))
    assert (stages.allocate_s, stages.reload_s, stages.prefill_s) == pytest.approx((0.002, 0.005, 0.004))
    assert stages.total_s == pytest.approx(0.011)


def test_a_request_without_restore_has_no_stages():
    with pytest.raises(ValueError, match="no stages"):
        stages_of(asked(None))


@pytest.mark.parametrize(
    ("shares_cores", "read_rate", "expected_s"),
    [
        (True, 500, 1.2),  # storage is the longest
        (True, 1e6, 0.5 + 400 / 1000 / 2),  # the same cores decode and compute
        (False, 1e6, 0.5),  # the device computes while cores decode
    ],
)
def test_the_bound_is_the_longest_of_what_cannot_be_shared(trace, shares_cores, read_rate, expected_s):
    throughputs = Throughputs(read_rate, 1000.0, 0.5, 2, 2, shares_cores)
    assert throughputs.bound_s(trace) == pytest.approx(expected_s)


def test_paths_that_do_not_hinder_each_other_reach_the_best():
    found = path_summary(2.0, 1.0, 1.0)
    assert found == {"ratio_sequential_over_parallel": 2.0, "swap_of_best": 1.0, "path_imbalance": 0.0}
    assert path_summary(1.0, 3.0, 1.0)["path_imbalance"] == pytest.approx(2 / 3)
    assert path_summary(1.0, 3.0, 1.0)["swap_of_best"] == pytest.approx(3 / 4)


def test_cases_stay_within_the_model():
    assert {case.end_tokens for case in engine_cases(False, 8192)} == {512, 544, 2056, 2080, 8168}
    assert all(case.end_tokens <= 1024 for case in engine_cases(False, 1024))
    assert 8160 not in {case.context_tokens for case in engine_cases(True, 8192)}


def test_a_row_counts_all_tokens_of_a_case():
    row = case_row("m", Case("decode", 512, 1, 16), "mzd", Series((0.5,)))
    assert (row["new_tokens"], row["tokens_per_s"], row["time_s"]) == (16, 32.0, 0.5)


def test_tokens_are_the_same_each_time():
    assert random_tokens(8, 320).tolist() == random_tokens(8, 320).tolist()
    assert random_tokens(1000, 320).max() < 320


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2]) == 2


def test_drawn_chunks_do_not_change_in_the_codec_any_more():
    codec, chunk_bytes = codec_by_name("int8"), 8192
    chunks = draw_chunks(codec, chunk_bytes, seed=1)
    payloads = np.zeros((len(chunks), codec.payload_bytes(chunk_bytes)), np.uint8)
    again = np.zeros_like(chunks)
    codec.encode_batch(row_addresses(chunks), row_addresses(payloads), chunk_bytes)
    codec.decode_batch(row_addresses(payloads), row_addresses(again), chunk_bytes)
    assert np.array_equal(again, chunks)
    assert len(np.unique(chunks.view(np.float16))) > 100


def test_laying_out_repeats_the_drawn_chunks():
    chunks = draw_chunks(codec_by_name("none"), 4096, seed=2)
    memory = np.zeros((40, 4096), np.uint8)
    lay_out(chunks, row_addresses(memory).tolist())
    assert np.array_equal(memory[17], chunks[1])
    assert np.array_equal(memory[:16], chunks)


def test_a_synthetic_model_is_a_model(tmp_path):
    geometry = Geometry("small", "llama", 2, 64, 96, 4, 2, 16, 128, 512)
    write_model(tmp_path / "a.gguf", geometry, seed=1)
    write_model(tmp_path / "b.gguf", geometry, seed=1)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    index = import_gguf(tmp_path / "a.gguf", tmp_path / "store")
    config = index.config
    assert (config.num_layers, config.hidden_size, config.ffn_size) == (2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 16, 128)
    with WeightStore.open(tmp_path / "store") as store:
        rows = store.read_rows("token_embd", [0, 127])
    assert rows.std() == pytest.approx(64**-0.5, rel=0.3)
    assert not np.array_equal(rows[0], rows[1])


def test_geometries_have_the_sizes_of_the_paper():
    qwen = GEOMETRIES["qwen3-0.6b"]
    assert (qwen.num_layers, qwen.hidden_size, qwen.vocab_size) == (28, 1024, 151_936)
    shapes = dict(qwen.tensors())
    assert qwen.dims(shapes["blk.27.attn_q.weight"]) == [1024, 2048]
    assert qwen.dims(shapes["blk.0.attn_k.weight"]) == [1024, 1024]


def test_every_bench_has_a_picture():
    assert set(PLOTS) == set(SUMMARY_KEYS)
    assert group_name({"model": "m", "remaining": 0.4963}, ("model", "remaining")) == "m\n50%"


def test_machine_and_commit_are_named():
    assert "Linux" in machine_name()
    assert commit_name()


def test_a_binding_that_does_not_load_counts_as_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)
    assert import_binding() is None
