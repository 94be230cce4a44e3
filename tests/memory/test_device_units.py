"""Units as allocations of their own: what is out, what is accessible, and when the device sees it."""

import ctypes
import errno

import numpy as np
import pytest

from mzd.errors import MzdError
from mzd.memory.backend import LeaseError, MemoryBackend
from mzd.memory.device_units import MappedUnits, StagedUnits
from mzd.memory.host_window import HostWindow

PAGE = 4096


class FakeDevice:
    """Memory of a device as bytes by address, out of the host's reach; knows what is mapped."""

    def __init__(self, limit_bytes=1 << 30):
        self.limit_bytes = limit_bytes
        self.units = {}
        self.maps = {}
        self.waited = []
        self.next = 1 << 44

    def allocate(self, size_bytes):
        if sum(map(len, self.units.values())) + size_bytes > self.limit_bytes:
            raise MzdError("insufficient_memory", "the device is full")
        address, self.next = self.next, self.next + size_bytes + PAGE
        self.units[address] = np.zeros(size_bytes, np.uint8)
        return address

    def free(self, addresses):
        for address in addresses:
            del self.units[address]

    def content(self, address, size_bytes):
        start = max(unit for unit in self.units if unit <= address)
        return self.units[start][address - start : address - start + size_bytes]

    def map(self, address, size_bytes, *, write):
        shadow = np.full(size_bytes, 0xAA, np.uint8) if write else self.content(address, size_bytes).copy()
        self.maps[shadow.ctypes.data] = (shadow, address, write)
        return shadow.ctypes.data

    def unmap(self, address, host_address):
        shadow, mapped_address, write = self.maps.pop(host_address)
        assert mapped_address == address
        if write:
            self.content(address, len(shadow))[:] = shadow

    def copy_in(self, address, host_address, size_bytes, *, wait=True):
        self.waited.append(wait)
        self.content(address, size_bytes)[:] = memory_at(host_address, size_bytes)

    def copy_out(self, address, host_address, size_bytes, *, wait=True):
        self.waited.append(wait)
        memory_at(host_address, size_bytes)[:] = self.content(address, size_bytes)


def memory_at(address, size_bytes):
    return np.ctypeslib.as_array((ctypes.c_ubyte * size_bytes).from_address(int(address)))


def u64(*values):
    return np.array(values, np.uint64)


@pytest.fixture
def fake():
    return FakeDevice()


@pytest.fixture
def window():
    area = np.zeros(65 * PAGE, np.uint8)
    address = -(-area.ctypes.data // PAGE) * PAGE
    yield HostWindow(address, 64 * PAGE)
    del area


@pytest.fixture(params=["mapped", "staged"])
def backend(request, fake, window) -> MemoryBackend:
    return MappedUnits(fake) if request.param == "mapped" else StagedUnits(fake, window)


def test_a_unit_takes_memory_when_it_is_populated_and_gives_it_back_when_released(backend, fake):
    leases = backend.reserve_run([PAGE, 3 * PAGE - 5])
    assert [lease.size_bytes for lease in leases] == [PAGE, 3 * PAGE]
    assert not fake.units
    assert not backend.gives_pages_back
    backend.populate(leases[1:])
    backend.populate(leases)
    assert {lease.address for lease in leases} == set(fake.units)
    assert backend.statistics().populated_bytes == backend.statistics().leased_bytes == 4 * PAGE
    with pytest.raises(LeaseError, match="still out"):
        backend.close()
    backend.release(leases)
    assert not fake.units
    assert backend.statistics().leased_bytes == 0
    backend.close()


def test_what_was_reserved_only_is_released_without_the_device(backend, fake):
    leases = backend.reserve_run([PAGE] * 3)
    backend.populate(leases[:1])
    backend.release(leases)
    assert not fake.units


def test_a_broken_invariant_is_refused_and_changes_nothing(backend, fake):
    leases = backend.reserve_run([PAGE, PAGE])
    backend.populate(leases)
    with pytest.raises(LeaseError, match="twice"):
        backend.release([leases[0], leases[0]])
    backend.release(leases[:1])
    with pytest.raises(LeaseError, match="not out"):
        backend.release(leases)
    with pytest.raises(LeaseError, match="not out"):
        backend.populate(leases[:1])
    with pytest.raises(ValueError, match="at least one byte"):
        backend.reserve_run([PAGE, 0])
    assert len(fake.units) == 1


def test_a_full_device_leaves_what_came_and_names_the_lack(fake, backend):
    fake.limit_bytes = 2 * PAGE
    leases = backend.reserve_run([PAGE] * 3)
    with pytest.raises(MzdError, match="full") as caught:
        backend.populate(leases)
    assert caught.value.code == "insufficient_memory"
    assert len(fake.units) == 2
    backend.release(leases)
    assert not fake.units


def test_the_device_sees_what_was_written_when_the_access_ends(backend, fake):
    leases = backend.reserve_run([2 * PAGE, PAGE])
    backend.populate(leases)
    addresses = u64(leases[0].address + PAGE, leases[1].address)
    sizes = u64(PAGE, 100)
    with backend.writing(addresses, sizes) as host:
        memory_at(host[0], PAGE)[:] = 7
        memory_at(host[1], 100)[:] = 8
        assert not any(content.any() for content in fake.units.values())
    assert (fake.units[leases[0].address] == np.repeat([0, 7], PAGE)).all()
    assert (fake.units[leases[1].address][:100] == 8).all()
    assert not fake.units[leases[1].address][100:].any()
    with backend.reading(addresses, sizes) as host:
        assert (memory_at(host[0], PAGE) == 7).all()
        assert (memory_at(host[1], 100) == 8).all()
    assert not fake.maps


def test_the_hosts_own_memory_passes_through(backend, fake):
    own = np.full(PAGE, 3, np.uint8)
    (lease,) = backend.reserve_run([PAGE])
    backend.populate([lease])
    with backend.reading(u64(own.ctypes.data, lease.address), u64(PAGE, PAGE)) as host:
        assert host[0] == own.ctypes.data
        assert host[1] != lease.address
    with backend.writing(u64(own.ctypes.data), u64(1 << 40)) as host:
        assert host.tolist() == [own.ctypes.data]


def test_nothing_stays_mapped_when_the_work_fails(backend, fake):
    (lease,) = backend.reserve_run([PAGE])
    backend.populate([lease])
    with pytest.raises(OSError, match="planted"), backend.writing(u64(lease.address), u64(PAGE)):
        raise OSError(errno.EIO, "planted")
    assert not fake.maps
    with backend.writing(u64(lease.address), u64(PAGE)):
        pass


def test_copies_of_a_batch_are_waited_for_once(fake, window):
    backend = StagedUnits(fake, window)
    leases = backend.reserve_run([PAGE] * 4)
    backend.populate(leases)
    addresses = u64(*(lease.address for lease in leases))
    with backend.writing(addresses, u64(*[PAGE] * 4)):
        pass
    assert fake.waited == [False, False, False, True]
