"""The device that the tests of this folder share.

`MZD_TEST_DEVICE` (part of its name), `MZD_TEST_MEMORY` and `MZD_TEST_KERNELS` choose another one than the
best, another kind of memory and another class of kernels.
"""

import os

import pytest

from mzd.device.opencl import OpenClDevice
from tests.device.coherent import CoherentDevice

ENGINE_TESTS = (
    "engine",
    "architectures",
    "mixed_types",
    "planted_errors",
    "self_test",
    "replay",
    "rope_positions",
)
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


@pytest.fixture
def with_cpu_kernels(device):
    """For tests that plant errors in these sources, or whose kernels are launched as these are."""
    if device.kernel_class != "cpu":
        pytest.skip("the device has other kernels")


@pytest.fixture
def with_shared_memory(device):
    """For tests of addresses that lie inside an allocation, which a buffer as an argument cannot have."""
    if not device.memory_kind.endswith("svm"):
        pytest.skip("the device's memory is buffers")


@pytest.fixture
def with_fine_memory(device):
    """For tests of what only fine-grain shared memory has."""
    if device.memory_kind != "fine_svm":
        pytest.skip("the device has other memory")
