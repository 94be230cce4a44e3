"""The bench `kernels`: everything is checked before it is timed, and told completely. No speed."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.benchmarks import kernel_work, kernels, statistics
from mzd.benchmarks.attention_work import attention_group
from mzd.benchmarks.elementwise_work import embedding_group, gate_group, norm_group, rope_group
from mzd.benchmarks.kernel_list import FULL, KERNEL_MODELS, MATMUL_TYPES, QUICK, kernel_groups, matrix_shape
from mzd.benchmarks.kernel_work import ROTATION_BYTES, SWEEP_LAUNCHES_MAX, require_near, sweep_launches
from mzd.benchmarks.kernels import measure_kernels
from mzd.benchmarks.matmul_work import matmul_group
from mzd.benchmarks.picture import PLOTS
from mzd.benchmarks.plain_read import PlainRead
from mzd.benchmarks.synthetic import GEOMETRIES
from mzd.device.attention import AttentionShape
from mzd.device.matmul import Matmul
from mzd.device.opencl import OpenClDevice
from mzd.device.trial_memory import TrialMemory
from mzd.errors import MzdError
from mzd.formats.ggml_types import GgmlType
from mzd.formats.layer_config import RopeConfig

SHAPE = AttentionShape(9, 3, 64)
GROUPS = [
    partial(matmul_group, type=GgmlType.Q8_0, rows=200, cols=64, num_tokens=8),
    partial(matmul_group, type=GgmlType.F16, rows=1000, cols=64, num_tokens=1),  # more than are drawn
    partial(attention_group, shape=SHAPE, num_tokens=8, context_tokens=512),
    partial(norm_group, num_tokens=3, hidden_size=576),
    partial(rope_group, num_tokens=300, shape=SHAPE, rope=RopeConfig("halves", 1e6, 64, None), qk_norm=True),
    partial(gate_group, num_tokens=3, ffn_size=500, activation="silu"),
    partial(embedding_group, num_tokens=3, hidden_size=64, type=GgmlType.Q8_0),
]


@pytest.fixture
def device(request):
    kernel_class, memory_kind = request.param
    device = OpenClDevice.open(kernel_class=kernel_class, memory_kind=memory_kind, keeps_times=True)
    yield device
    device.close()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory, one round, nobody to compare with."""
    monkeypatch.setattr(kernel_work, "ROTATION_BYTES", 1 << 18)
    monkeypatch.setattr(kernels, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "rounds", lambda _quick: 1)
    monkeypatch.setattr(statistics, "SETTLE_S", 0.0)
    monkeypatch.setattr(kernels.GgmlPeers, "find", lambda _threads: None)


@pytest.mark.parametrize("device", [("cpu", "fine_svm")], indirect=True)
async def test_every_kind_of_kernel_is_checked_and_told(device):
    told = []
    result = await measure_kernels(device, GROUPS, quick=True, report=told.append)
    found = result.as_map()
    names = ["copy", "matmul q8_0 f32", "matmul q8_0 int8", "matmul f16 f32", "attention"]
    assert [row["kernel"] for row in found["rows"]] == [
        *names,
        "rms_norm",
        "rope_kv",
        "gated_mul",
        "embed q8_0",
    ]
    for row in found["rows"][1:]:
        assert min(row["time_s"], row["gb_s"], row["gflop_s"], row["over_read"], row["over_copy"]) > 0
        assert row["over_llama_cpp"] is None
    assert {PLOTS["kernels"].colour, PLOTS["kernels"].value, *PLOTS["kernels"].groups} <= set(
        found["rows"][0]
    )
    assert set(found["kernels"]["matmul q8_0 int8, 8 tokens"]) == {
        "gb_s",
        "gflop_s",
        "over_read",
        "over_copy",
    }
    assert "attention, 8 tokens, 9/3x64 over 512" in found["kernels"]
    assert found["synthetic"] is True
    assert len(told) == len(found["rows"])
    assert "the host's clock" in found["notes"][0]


@pytest.mark.parametrize("device", [("gpu", "staged")], indirect=True)
async def test_a_gpu_is_measured_by_its_own_clock(device):
    result = await measure_kernels(device, [GROUPS[1], GROUPS[3]], quick=True, report=lambda _: None)
    assert [row["kernel"] for row in result.rows] == ["copy", "matmul f16 f32", "rms_norm"]
    assert all(row["time_s"] > 0 for row in result.rows)
    assert "times by the device's own; memory staged, kernels for a gpu" in result.notes


@pytest.mark.parametrize("device", [("cpu", "fine_svm")], indirect=True)
async def test_a_kernel_that_computes_nothing_has_no_speed(device, monkeypatch):
    monkeypatch.setattr(Matmul, "enqueue", lambda *_, **__: None)
    with pytest.raises(MzdError, match="matmul q8_0 f32, 200x64, 8 tokens is computed wrongly"):
        await measure_kernels(device, GROUPS[:1], quick=True, report=lambda _: None)


@pytest.mark.parametrize("device", [("gpu", "staged")], indirect=True)
def test_a_read_of_other_bytes_is_noticed(device):
    memory = TrialMemory(device)
    source = memory.put(np.arange(1024, dtype=np.uint32).view(np.uint8).reshape(2, -1))
    read = PlainRead(memory, source)
    read.check()
    source.values[-1, 7] ^= 1  # the host's copy only
    with pytest.raises(MzdError, match="reads wrong bytes"):
        read.check()
    memory.free()


@pytest.mark.parametrize("device", [("cpu", "fine_svm")], indirect=True)
def test_a_read_takes_whole_lines(device):
    memory = TrialMemory(device)
    with pytest.raises(ValueError, match="no whole lines"):
        PlainRead(memory, memory.zeros((2, 96), np.uint8))
    memory.free()


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 40))
def test_a_measurement_is_long_enough_for_memory_and_short_enough_for_people(size_bytes, flops):
    launches = sweep_launches(size_bytes, flops)
    assert 1 <= launches <= SWEEP_LAUNCHES_MAX
    assert launches == 1 or (launches - 1) * size_bytes < ROTATION_BYTES


def test_not_a_number_is_not_near():
    require_near("x", np.array([1.0, 2.0]), np.array([1.0, 2.00001]), 1e-4)
    for wrong in (np.nan, 2.1):
        with pytest.raises(MzdError, match="x is computed wrongly"):
            require_near("x", np.array([1.0, wrong]), np.array([1.0, 2.0]), 1e-4)


def test_what_is_measured():
    assert matrix_shape(GEOMETRIES["qwen3-0.6b"], "attn_output") == (1024, 2048)
    assert matrix_shape(GEOMETRIES["smollm2-135m"], "output") == (49_152, 576)
    full, quick = (list(kernel_groups(KERNEL_MODELS, extent)) for extent in (FULL, QUICK))
    products = [group.args[:4] for group in full if group.func.__name__ == "_matmul"]
    assert {args[0] for args in products} == set(MATMUL_TYPES)
    assert (GgmlType.Q8_0, 1536, 576, 512) in products
    assert (GgmlType.Q4_K, 576, 1536, 512) in products
    assert (GgmlType.Q4_K, 1536, 576, 512) not in products  # 576 is no multiple of 256
    assert (GgmlType.F16, 151_936, 1024, 1) in products
    assert (GgmlType.F16, 151_936, 1024, 512) not in products
    assert len(products) == len(set(products))
    assert len(quick) < len(full) / 2
