"""Memory of the device one allocation at a time, in each kind, on the device at hand."""

import ctypes
import itertools

import numpy as np
import pytest

from mzd.device.opencl import OpenClDevice
from mzd.device.places import BufferMap, Place
from mzd.device.selection import MEMORY_KINDS, candidates, memory_kinds
from mzd.errors import MzdError

SIZE = 3 * 4096


@pytest.fixture(scope="module", params=MEMORY_KINDS)
def device(request):
    device = OpenClDevice.open(memory_kind=request.param)
    yield device
    device.close()


@pytest.fixture
def unit(device):
    address = device.allocations.allocate(SIZE)
    yield address
    device.allocations.free([address])


def memory_at(address, size_bytes):
    return np.ctypeslib.as_array((ctypes.c_ubyte * size_bytes).from_address(int(address)))


def read_back(device, address, size_bytes=SIZE):
    host_address = device.allocations.map(address, size_bytes, write=False)
    content = memory_at(host_address, size_bytes).copy()
    device.allocations.unmap(address, host_address)
    return content


def test_memory_is_new_and_zero(device, unit):
    assert unit % 128 == 0
    assert not read_back(device, unit).any()


def test_what_a_map_writes_is_there_at_its_place(device, unit):
    host_address = device.allocations.map(unit + 4096, 64, write=True)
    memory_at(host_address, 64)[:] = 5
    device.allocations.unmap(unit + 4096, host_address)
    found = read_back(device, unit)
    assert (found[4096 : 4096 + 64] == 5).all()
    assert np.count_nonzero(found) == 64


@pytest.mark.parametrize("wait", [True, False])
def test_copies_go_both_ways(device, unit, wait):
    sent = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    got = np.zeros_like(sent)
    device.allocations.copy_in(unit + 192, sent.ctypes.data, len(sent), wait=wait)
    device.allocations.copy_out(unit + 192, got.ctypes.data, len(got))
    assert np.array_equal(sent, got)


def test_scratch_is_seen_by_both_sides(device):
    scratch = device.allocate_scratch(4096)
    view = scratch.view(np.uint32, (1024,))
    assert not view.any()
    view[:] = np.arange(1024)
    scratch.upload(400, 400)
    scratch.upload()
    device.finish()
    if device.memory_kind != "fine_svm":
        view[:] = 0
    scratch.download(0, 2048)
    scratch.download(2048)
    device.finish()
    assert np.array_equal(view, np.arange(1024))
    scratch.free()
    with pytest.raises(RuntimeError, match="twice"):
        scratch.free()


def test_what_the_device_has_no_room_for_is_refused(device):
    with pytest.raises(MzdError) as caught:
        device.allocations.allocate(1 << 60)
    assert caught.value.code == "insufficient_memory"


def test_pinned_memory_is_the_hosts(device):
    pinned = device.pin_host_memory(1 << 20)
    memory_at(pinned.address, 1 << 20)[:] = 1
    pinned.free()
    with pytest.raises(RuntimeError, match="twice"):
        pinned.free()


def test_a_map_of_buffers_finds_the_buffer_behind_an_address():
    buffers = BufferMap()
    for index, start in enumerate((0x3000, 0x1000, 0x8000)):
        buffers.add(start, 0x1000, index)
    assert buffers.locate(0x1FFF) == Place(1, 0xFFF)
    assert buffers.locate(0x3000) == Place(0, 0)
    assert buffers.find(0x2000) is buffers.find(0xFFF) is buffers.find(0x9000) is None
    with pytest.raises(MzdError, match="no buffer"):
        buffers.locate(0x2000)
    generation = buffers.generation
    assert buffers.remove(0x3000) == 0
    assert buffers.generation > generation
    assert buffers.find(0x3000) is None
    with pytest.raises(RuntimeError, match="no buffer begins"):
        buffers.remove(0x1004)


def test_stand_in_addresses_are_apart():
    device = OpenClDevice.open(memory_kind="buffers")
    addresses = [device.allocations.allocate(SIZE) for _ in range(5)]
    assert all(other - one >= SIZE for one, other in itertools.pairwise(addresses))
    device.allocations.free(addresses)
    device.close()


def test_every_way_to_use_the_device_is_a_candidate(engine_device):
    name = engine_device.name
    ways = candidates(name)
    assert tuple(way.memory_kind for way in ways) == memory_kinds(ways[0].device)
    assert set(memory_kinds(ways[0].device)) <= set(MEMORY_KINDS)
    (only,) = candidates(name, memory_kind="staged", kernel_class="gpu")
    assert (only.memory_kind, only.kernel_class) == ("staged", "gpu")
    with pytest.raises(MzdError, match="no OpenCL device is called"):
        candidates("no such device")
