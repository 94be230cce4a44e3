"""The OpenCL layer: what it opens, allocates, builds, launches and waits for, and what it says of errors."""

import os
import threading

import numpy as np
import pyopencl as cl
import pytest
import trio

from mzd.device.opencl import OpenClDevice
from mzd.errors import MzdError


class Silu:
    """gated_mul over `count` floats, as the smallest kernel at hand."""

    def __init__(self, device, count):
        self.buffer = device.allocate_scratch(8 * count)
        self.gate = self.buffer.view(np.float32, (count,))
        self.up = self.buffer.view(np.float32, (count,), offset_bytes=4 * count)
        self.kernel = device.kernel(device.build("elementwise"), "gated_mul")
        self.kernel.set_address(0, self.buffer.address)
        self.kernel.set_address(1, self.buffer.address + 4 * count)
        self.kernel.set_int(2, count)
        self.num_blocks = -(-count // 512)

    def enqueue(self):
        self.kernel.enqueue((self.num_blocks,), (1,))


def test_open_names_the_devices_there_are():
    with pytest.raises(MzdError, match="no OpenCL device is called 'no such'") as raised:
        OpenClDevice.open("no such")
    assert raised.value.code == "device_lost"
    assert raised.value.data["devices"]


def test_open_by_part_of_the_name(device):
    again = OpenClDevice.open(device.name[2:9].upper())
    assert again.name == device.name
    again.close()


def test_facts(device):
    assert device.compute_units >= 1
    assert device.svm_level in ("none", "coarse_buffer", "fine_buffer", "fine_system")
    assert device.driver


def test_impossible_reservation(device):
    with pytest.raises(MzdError) as raised:
        device.reserve_svm(1 << 60)
    assert raised.value.code == "insufficient_memory"
    assert raised.value.data["requested_bytes"] == 1 << 60


@pytest.mark.usefixtures("with_fine_memory")
def test_reservation_is_freed_once(device):
    reservation = device.reserve_svm(4096)
    reservation.free()
    with pytest.raises(RuntimeError, match="freed twice"):
        reservation.free()


def test_scratch_is_zeroed_and_views_stay_inside(device):
    scratch = device.allocate_scratch(1024)
    assert not scratch.view(np.uint8, (1024,)).any()
    view = scratch.view(np.int32, (2, 3), offset_bytes=1000)
    view[:] = 7
    assert scratch.view(np.int32, (6,), offset_bytes=1000).tolist() == [7] * 6
    for shape, offset in (((7,), 1000), ((1,), -4)):
        with pytest.raises(ValueError, match="do not fit"):
            scratch.view(np.int32, shape, offset_bytes=offset)
    scratch.free()


def test_same_build_is_the_same_program(device):
    assert device.build("elementwise") is device.build("elementwise")
    assert device.build("elementwise", UNUSED=1) is not device.build("elementwise")


def test_build_error_has_the_log(device):
    with pytest.raises(MzdError, match="HEAD_DIM") as raised:
        device.build("rope")  # its defines are missing
    assert raised.value.code == "internal"


def test_unknown_kernel(device):
    with pytest.raises(MzdError, match=r"elementwise.cl: no_such\) failed: INVALID_KERNEL_NAME"):
        device.kernel(device.build("elementwise"), "no_such")


def test_refused_launch_names_the_error(device):
    silu = Silu(device, 512)
    with pytest.raises(MzdError, match="clEnqueueNDRangeKernel failed: INVALID_WORK_GROUP_SIZE"):
        silu.kernel.enqueue((2,), (2,))
    device.finish()
    silu.buffer.free()


def test_arguments_may_change_between_launches(device):
    silu = Silu(device, 1024)
    silu.gate[:] = 3.0
    silu.up[:] = 1.0
    silu.kernel.set_int(2, 512)
    silu.kernel.enqueue((1,), (1,))
    silu.kernel.set_address(0, silu.buffer.address + 4 * 512)
    silu.kernel.set_address(0, silu.buffer.address + 4 * 512)
    silu.up[:] = 1.0
    silu.kernel.enqueue((1,), (1,))
    device.finish()
    assert np.allclose(silu.gate, 3 / (1 + np.exp(-3)))
    silu.buffer.free()


async def test_wait_returns_after_the_work(device):
    silu = Silu(device, 1 << 20)
    silu.gate[:] = 1.0
    silu.up[:] = 2.0
    silu.enqueue()
    event = device.mark()
    await device.wait(event)
    assert event.command_execution_status == cl.command_execution_status.COMPLETE
    assert np.allclose(silu.gate, 2 / (1 + np.exp(-1)))
    silu.buffer.free()


async def test_several_tasks_wait_for_one_queue(device):
    silu = Silu(device, 1 << 18)
    ended = []

    async def wait(number, event):
        await device.wait(event)
        ended.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            silu.enqueue()
            nursery.start_soon(wait, number, device.mark())
    assert sorted(ended) == [0, 1, 2, 3]
    silu.buffer.free()


async def test_cancelled_wait_returns_only_when_the_event_is_over(device):
    silu = Silu(device, 1 << 20)
    for _ in range(50):
        silu.enqueue()
    event = device.mark()
    with trio.CancelScope() as scope:
        scope.cancel()
        await device.wait(event)
    assert scope.cancelled_caught
    assert event.command_execution_status == cl.command_execution_status.COMPLETE
    silu.buffer.free()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_waits_one_after_the_other_share_what_wakes_them(device, is_cancelled):
    """Each waits for its own event, cancelled or not, and files are not opened for every step."""
    await device.wait(device.mark())
    num_files = len(os.listdir("/proc/self/fd"))
    events = [cl.UserEvent(device._context) for _ in range(20)]
    for event in events:
        threading.Timer(0.005, event.set_status, (cl.command_execution_status.COMPLETE,)).start()
        await (cancelled_wait(device, event) if is_cancelled else device.wait(event))
        assert event.command_execution_status == cl.command_execution_status.COMPLETE
    assert len(os.listdir("/proc/self/fd")) == num_files


async def cancelled_wait(device, event):
    with trio.CancelScope() as scope:
        scope.cancel()
        await device.wait(event)
    assert scope.cancelled_caught


@pytest.mark.usefixtures("with_cpu_kernels")
async def test_failed_event_is_an_error(device):
    event = cl.UserEvent(device._context)  # the one kind of event that a test can make fail
    event.set_status(-5)
    with pytest.raises(MzdError, match="clWaitForEvents failed") as raised:
        await device.wait(event)
    assert raised.value.code == "device_lost"
