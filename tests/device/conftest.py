"""The device that the tests of this folder share.

`MZD_TEST_DEVICE` (part of its name), `MZD_TEST_MEMORY` and `MZD_TEST_KERNELS` choose another one than the
best, another kind of memory and another class of kernels.
"""

import os

import pytest

from mzd.device.opencl import OpenClDevice
from tests.device.coherent import CoherentDevice

ENGINE_TESTS = ("engine", "architectures", "mixed_types", "planted_errors", "self_test", "replay")
"""Words in the names of modules that use a device as the daemon does."""

WAY = {
    "name": os.environ.get("MZD_TEST_DEVICE"),
    "memory_kind": os.environ.get("MZD_TEST_MEMORY"),
    "kernel_class": os.environ.get("MZD_TEST_KERNELS"),
}


@pytest.fixture(scope="session")
def engine_device():
    device = OpenClDevice.open(**WAY)
    yield device
    device.close()


@pytest.fixture(scope="session")
def kernel_device(engine_device):
    """The same in one memory where that is shared: the tests of kernels need no copies there."""
    if engine_device.memory_kind == "fine_svm":
        yield engine_device
        return
    device = CoherentDevice.open(**WAY)
    yield device
    device.close()


@pytest.fixture(scope="module")
def device(request, engine_device, kernel_device):
    is_engine = any(word in request.module.__name__ for word in ENGINE_TESTS)
    return engine_device if is_engine else kernel_device
