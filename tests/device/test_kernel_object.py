"""Kernel objects: what they say of themselves, that they are given back, and a name that is none."""

import gc

import pytest

from mzd.device import kernel_object
from mzd.errors import MzdError


def test_it_knows_its_name_and_arguments(device):
    kernel = device.build("addresses").create_kernel("gather")
    assert (kernel.name, kernel.num_args) == ("gather", 3)


def test_each_is_another(device):
    program = device.build("addresses")
    first, second = program.create_kernel("gather"), program.create_kernel("gather")
    assert first.handle != second.handle


def test_it_is_released_with_its_owner(device, monkeypatch):
    program = device.build("addresses")
    released = []
    real = kernel_object.libopencl()

    class Watched:
        def __getattr__(self, name):
            call = getattr(real, name)
            return (lambda handle: released.append(handle) or call(handle)) if "Release" in name else call

    monkeypatch.setattr(kernel_object, "libopencl", Watched)
    kernel = program.create_kernel("gather")
    handle = kernel.handle
    assert not released
    del kernel
    gc.collect()
    assert released == [handle]


def test_a_kernel_that_is_not_there_is_named(device):
    with pytest.raises(MzdError, match=r"addresses.cl: nothing\) failed: INVALID_KERNEL_NAME"):
        device.build("addresses").create_kernel("nothing")
