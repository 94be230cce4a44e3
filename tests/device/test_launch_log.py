"""The device's own times of launches: one for each, while they are asked for."""

import pytest

from mzd.device.elementwise import GatedMul
from mzd.device.opencl import OpenClDevice
from mzd.device.replay import Replay


@pytest.fixture
def timed_device():
    device = OpenClDevice.open(keeps_times=True)
    yield device
    device.close()


@pytest.fixture
def launch(timed_device):
    """Runs a kernel once."""
    buffer = timed_device.allocate_scratch(8192)
    gated = GatedMul(timed_device, "silu")

    def enqueue():
        gated.enqueue(gate_address=buffer.address, up_address=buffer.address + 4096, count=1000)

    yield enqueue
    timed_device.finish()
    buffer.free()


def test_each_recorded_launch_has_a_duration(timed_device, launch):
    launch()
    with timed_device.launches.recording() as launches:
        launch()
        launch()
        timed_device.finish()
        durations_ns = launches.durations_ns()
    assert len(durations_ns) == 2
    assert all(duration_ns > 0 for duration_ns in durations_ns)
    assert timed_device.launches.durations_ns() == []


def test_replayed_launches_leave_their_events_too(timed_device, launch):
    row = Replay(timed_device.kernel_queue)
    row.run("key", launch)
    with timed_device.launches.recording() as launches:
        row.run("key", pytest.fail)
        timed_device.finish()
        assert len(launches.durations_ns()) == 1


def test_recordings_do_not_nest(timed_device):
    with (
        timed_device.launches.recording(),
        pytest.raises(RuntimeError, match="already"),
        timed_device.launches.recording(),
    ):
        pass


def test_a_device_keeps_no_times_unless_asked(device):
    assert device.launches is None
