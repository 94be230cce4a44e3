"""Whether kernels get the list of allocations behind pointers: where it is cheap, or where it is needed."""

import numpy as np
import pytest

import mzd.device.opencl
from mzd.device import pointer_lists
from mzd.device.opencl import OpenClDevice
from mzd.device.pointer_lists import COST_NS_MAX, NOT_NEEDED, SHORT, PointerLists, decide
from mzd.errors import MzdError


def never_asked():
    raise AssertionError("a cheap list needs no proof that it can go")


def test_a_cheap_list_stays():
    assert decide(COST_NS_MAX, never_asked).used


def test_a_dear_list_goes_where_kernels_are_right_without():
    assert not decide(COST_NS_MAX + 0.1, lambda: True).used
    assert decide(COST_NS_MAX + 0.1, lambda: False).used


def test_a_driver_that_takes_no_list_must_be_right_without():
    assert not decide(None, lambda: True).used
    with pytest.raises(MzdError, match="wrong without it"):
        decide(None, lambda: False)


@pytest.fixture(scope="module")
def coarse():
    device = OpenClDevice.open(memory_kind="coarse_svm")
    yield device
    device.close()


def gather(device):
    program = device.build("addresses")
    return lambda: program.create_kernel("gather")


def trial(device):
    return pointer_lists._Trial(device.allocations, device._queue_handle, gather(device))


def test_a_device_knows_its_decision(device, coarse):
    assert device.pointer_lists == SHORT or not device.owns_host_pages
    assert coarse.pointer_lists.cost_ns is not None
    buffers = OpenClDevice.open(memory_kind="buffers")
    assert buffers.pointer_lists == NOT_NEEDED
    buffers.close()


def test_fresh_allocations_are_followed_and_given_back(coarse):
    live = len(coarse.allocations._live)
    tried = trial(coarse)
    assert tried.is_right_without_list()
    tried.free()
    assert len(coarse.allocations._live) == live


def test_wrong_marks_show(coarse, monkeypatch):
    tried = trial(coarse)
    monkeypatch.setattr(tried, "_marks_found", lambda: np.zeros(pointer_lists.NUM_POINTERS, np.uint32))
    assert not tried.is_right_without_list()
    tried.free()


def test_a_refused_list_is_no_failure(coarse, monkeypatch):
    def refuse(self):
        raise MzdError("internal", "clSetKernelExecInfo failed: INVALID_OPERATION")

    monkeypatch.setattr(pointer_lists.BoundKernel, "declare_pointers", refuse)
    found = pointer_lists.measure_pointer_lists(coarse.allocations, coarse._queue_handle, gather(coarse))
    assert (found.used, found.cost_ns) == (False, None)
    assert "takes no list" in found.reason


@pytest.mark.parametrize("used", [True, False])
def test_kernels_obey(monkeypatch, used):
    monkeypatch.setattr(
        mzd.device.opencl, "measure_pointer_lists", lambda *_: PointerLists(used, 99.0, "planted")
    )
    device = OpenClDevice.open(memory_kind="coarse_svm")
    address = device.allocations.allocate(256)
    kernel = device.kernel(device.build("addresses"), "gather", follows_pointers=True)
    listed = [] if kernel._svm_pointers is None else kernel._svm_pointers().tolist()
    assert listed == ([address] if used else [])
    device.allocations.free([address])
    assert not used or kernel._svm_pointers().size == 0
    device.close()
