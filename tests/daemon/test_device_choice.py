"""The device is chosen by proof: what is wrong gives way to the next, and is told of by name."""

from __future__ import annotations

from types import SimpleNamespace

import pyopencl as cl
import pytest

import mzd.device.opencl
from mzd.daemon import device_choice
from mzd.daemon.config import Config
from mzd.daemon.device_choice import choose_device, ways_to_compute
from mzd.daemon.kernel_cache import KernelCache
from mzd.device.opencl import OpenClDevice
from mzd.device.selection import Candidate
from mzd.device.self_test import self_test
from mzd.errors import MzdError
from tests.device.test_self_test import FIXTURES, broken
from tests.reference.model import pack_units, read_model


class FakeDevice:
    """A device that notes whether it was closed."""

    driver = "driver 1"

    def __init__(self, candidate):
        self.name = candidate.name
        self.memory_kind = candidate.memory_kind
        self.kernel_class = candidate.kernel_class
        self.closed = False

    def close(self):
        self.closed = True


def way(name, memory_kind="coarse_svm"):
    return Candidate(SimpleNamespace(name=name), memory_kind, "gpu")


@pytest.fixture
def offer(monkeypatch):
    """Ways to compute instead of this machine's."""

    def use(*ways):
        monkeypatch.setattr(device_choice, "candidates", lambda *_: list(ways))

    return use


def wrong(name, code="device_lost"):
    """A proof that only devices called otherwise pass."""

    def prove(device):
        if device.name == name:
            raise MzdError(code, f"{name} computes embed wrongly\nmore", kernel="embed")

    return prove


def test_the_best_is_taken_where_it_is_right(offer):
    offer(way("first"), way("second"))
    chosen = choose_device(Config(), FakeDevice, wrong("none"))
    assert chosen.device.name == "first"
    assert chosen.refusals == ()


@pytest.mark.parametrize("code", ["device_lost", "internal", "insufficient_memory"])
def test_a_wrong_device_gives_way_to_the_next(offer, caplog, code):
    opened = []
    offer(way("first"), way("second"))
    chosen = choose_device(
        Config(), lambda c: opened.append(FakeDevice(c)) or opened[-1], wrong("first", code)
    )
    assert chosen.device is opened[1]
    assert [device.closed for device in opened] == [True, False]
    (refusal,) = chosen.refusals
    assert (refusal.device, refusal.kernel, refusal.memory) == ("first", "embed", "coarse_svm")
    assert refusal.reason == "first computes embed wrongly"
    assert "first computes embed wrongly" in caplog.text


def test_a_device_that_cannot_be_opened_gives_way(offer):
    def open_device(candidate):
        if candidate.name == "first":
            raise cl.LogicError("clCreateContext failed: DEVICE_NOT_AVAILABLE")
        return FakeDevice(candidate)

    offer(way("first"), way("second"))
    chosen = choose_device(Config(), open_device, wrong("none"))
    assert chosen.device.name == "second"
    assert chosen.refusals[0].kernel == ""
    assert "DEVICE_NOT_AVAILABLE" in chosen.refusals[0].reason


def test_the_start_fails_when_none_is_left_and_names_each(offer):
    offer(way("same", "coarse_svm"), way("same", "buffers"))
    with pytest.raises(MzdError, match=r"memory coarse_svm.*memory buffers.*pocl-opencl-icd") as raised:
        choose_device(Config(), FakeDevice, wrong("same"))
    assert raised.value.code == "device_lost"
    assert [refusal["kernel"] for refusal in raised.value.data["refusals"]] == ["embed", "embed"]


def test_what_speaks_against_the_model_ends_the_search(offer):
    offer(way("first"), way("second"))
    opened = []
    with pytest.raises(MzdError) as raised:
        choose_device(
            Config(), lambda c: opened.append(FakeDevice(c)) or opened[-1], wrong("first", "unsupported_type")
        )
    assert raised.value.code == "unsupported_type"
    assert [device.closed for device in opened] == [True]


def test_damaged_kernels_are_thrown_away_before_a_device_is_refused(offer, tmp_path):
    """The best way to compute is not given up for what lies in its cache."""
    offer(way("first"), way("second"))
    kernel = tmp_path / "kernel.so"
    kernel.write_bytes(b"damaged")

    def prove(_):
        if kernel.exists():
            raise MzdError("internal", "building failed", opencl_error="INVALID_KERNEL_NAME")

    chosen = choose_device(Config(), FakeDevice, prove, cache=KernelCache(tmp_path))
    assert chosen.device.name == "first"
    assert chosen.refusals == ()


def test_what_is_configured_is_not_replaced(offer):
    offer(way("first", "buffers"))
    config = Config(device="fir", memory="buffers", kernels="gpu")
    with pytest.raises(MzdError) as raised:
        choose_device(config, FakeDevice, wrong("first"))
    for setting in ('device = "fir"', 'memory = "buffers"', 'kernels = "gpu"'):
        assert setting in raised.value.message


def test_ways_follow_the_configuration():
    assert {way.memory_kind for way in ways_to_compute(Config(memory="coarse_svm"))} == {"coarse_svm"}
    assert {way.kernel_class for way in ways_to_compute(Config(kernels="gpu"))} == {"gpu"}
    assert len({way.memory_kind for way in ways_to_compute(Config())}) > 1
    with pytest.raises(MzdError, match=r'is called.*change or leave out device = "none"'):
        ways_to_compute(Config(device="none"))


def test_a_kernel_that_is_wrong_in_one_kind_of_memory(monkeypatch):
    """A real device, whose first way to compute has a wrong kernel planted; the second is tried for real."""
    index = pack_units(read_model(FIXTURES / "llama-Q4_1.gguf"))[0]
    wrong_source = broken("elementwise", "1.0f + e", "1.001f + e")
    right_source = mzd.device.opencl.kernel_source

    def open_device(candidate):
        planted = candidate.memory_kind == ways[0].memory_kind
        monkeypatch.setattr(mzd.device.opencl, "kernel_source", wrong_source if planted else right_source)
        return OpenClDevice(candidate, cache_dir=None)

    ways = ways_to_compute(Config())
    chosen = choose_device(Config(), open_device, lambda device: self_test(device, index, activations="f32"))
    assert chosen.device.memory_kind == ways[1].memory_kind
    assert [refusal.kernel for refusal in chosen.refusals] == ["gated_mul, silu"]
    chosen.device.close()
