"""Every bench once on a tiny model: correctness of the outputs and form of the results, no speed."""

import numpy as np
import pytest

from mzd.benchmarks.breakdown import measure_breakdown
from mzd.benchmarks.daemon_harness import CONTEXT, open_daemon
from mzd.benchmarks.engine import run_engine
from mzd.benchmarks.engine_cases import Case
from mzd.benchmarks.evict import measure_evict
from mzd.benchmarks.order import measure_order
from mzd.benchmarks.overlap import measure_overlap
from mzd.benchmarks.picture import PLOTS
from mzd.benchmarks.resident_model import ResidentModel
from mzd.benchmarks.restore_bench import run_restore_bench
from mzd.benchmarks.results import SUMMARY_KEYS
from mzd.benchmarks.swap import measure_swap
from mzd.benchmarks.workloads import Workload
from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError
from mzd.model.weight_store import WeightStore
from mzd.native import fill
from mzd.policy.residency import UnitState

MEASURES = {
    "breakdown": measure_breakdown,
    "evict": measure_evict,
    "order": measure_order,
    "overlap": measure_overlap,
    "swap": measure_swap,
}


def quiet(_line):
    """Nobody listens."""


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize("bench", MEASURES)
async def test_restore_benches(tiny, bench):
    workload = Workload(tiny, 480)
    result = await run_restore_bench(bench, [workload], MEASURES[bench], quick=True, report=quiet)
    found = result.as_map()
    assert set(SUMMARY_KEYS[bench]) <= set(found)
    assert found["synthetic"] is True
    assert {PLOTS[bench].colour, PLOTS[bench].value, *PLOTS[bench].groups} <= set(found["rows"][0])
    assert all(0 <= row["remaining"] <= 0.75 for row in found["rows"])


@pytest.mark.usefixtures("uncached")
async def test_engine_bench(tiny, monkeypatch):
    monkeypatch.setattr("mzd.benchmarks.engine.import_binding", lambda: None)
    cases = [Case("prompt", 0, 64), Case("short", 128, 8), Case("decode", 128, 1, 4)]
    result = await run_engine([tiny], quick=True, report=quiet, choose_cases=lambda *_: cases)
    found = result.as_map()
    assert {(row["case"], row["system"]) for row in found["rows"]} == {
        (case.kind, "mzd f32")  # an F16 model has no int8
        for case in cases
    }
    assert all(row["tokens_per_s"] > 0 for row in found["rows"])
    assert not set(SUMMARY_KEYS["engine"]) & set(found)
    assert any("llama" in note for note in found["notes"])


async def test_a_resident_model_lies_in_any_kind_of_memory(tiny):
    tokens = np.arange(40, dtype=np.int32)
    answers = []
    with WeightStore.open(tiny.store_path) as store:
        for kind in ("fine_svm", "staged"):
            device = OpenClDevice.open(memory_kind=kind)
            model = ResidentModel(device, store, context_tokens=64, activations="f32")
            await model.fill(tokens[:30])
            await model.fill(tokens, 30)
            await model.answer(tokens[:4], 40)
            answers.append(model.logits().copy())
            model.close()
            device.close()
    assert np.array_equal(*answers)


async def test_a_damaged_store_is_no_model(tiny):
    with WeightStore.open(tiny.store_path) as store:
        offset = store.index.layers[1].offset_bytes
        with tiny.store_path.open("r+b") as file:
            file.seek(offset)
            file.write(b"damaged")
        device = OpenClDevice.open()
        with pytest.raises(MzdError, match=rf"damaged, at byte {offset}"):
            ResidentModel(device, store, context_tokens=64, activations="f32")
        device.close()


async def test_wrong_logits_have_no_speed(tiny):
    """A chunk that holds other content than before must stop the bench."""
    async with open_daemon(Workload(tiny, 480)) as daemon:
        cache = daemon.parts.units.caches[CONTEXT]
        fill(cache.leases[0, 0].address, daemon.parts.units.kv_sizes.chunk_bytes, 0)
        with pytest.raises(MzdError, match="other logits"):
            await daemon.ask()


async def test_the_harness_evicts_to_a_level_and_frees_all_at_the_end(tiny):
    async with open_daemon(Workload(tiny, 480)) as daemon:
        await daemon.evict_to(0.5)
        assert 0.25 < daemon.remaining <= 0.5
        assert daemon.parts.units.head.state is UnitState.DROPPED
        assert (await daemon.ask()).trace is not None
        assert (await daemon.ask()).trace is None
        memory = daemon.parts.memory
    assert memory.statistics().populated_bytes == 0
