"""The device that the tests of this folder share, and units laid out in its memory."""

import pytest

from mzd.device.opencl import OpenClDevice


@pytest.fixture(scope="session")
def device():
    device = OpenClDevice.open()
    yield device
    device.close()
