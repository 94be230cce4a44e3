"""Whether files can be read right into units: tried with a real page, and what it takes is given back."""

import errno
import os

import pytest

from mzd.device import direct_reads
from mzd.device.direct_reads import direct_read_refusal
from mzd.device.extensions import useful_extensions
from mzd.device.opencl import OpenClDevice
from mzd.device.selection import all_devices


@pytest.fixture(scope="module")
def mapped():
    device = OpenClDevice.open(memory_kind="coarse_svm")
    yield device
    device.close()


def test_memory_of_our_own_takes_them(device, monkeypatch):
    monkeypatch.setattr(direct_reads.os, "open", None)  # not even tried
    assert direct_read_refusal(device) == ""


@pytest.mark.parametrize(("error", "said"), [(None, ""), (errno.EFAULT, os.strerror(errno.EFAULT))])
def test_the_kernels_word_counts(mapped, monkeypatch, tmp_path, error, said):
    pages = []

    def preadv(fd, buffers, offset):
        pages.extend(buffers)
        if error:
            raise OSError(error, os.strerror(error))
        return len(buffers[0])

    monkeypatch.setattr(direct_reads.os, "preadv", preadv)
    monkeypatch.setattr(direct_reads.os, "O_DIRECT", 0)  # whatever the temporary directory is
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    live = len(mapped.allocations._live)
    assert direct_read_refusal(mapped, str(path)).startswith(said)
    assert [len(page) for page in pages] == [4096]
    assert len(mapped.allocations._live) == live


def test_a_file_that_cannot_be_read_so_says_nothing_of_the_memory(mapped):
    assert "not known" in direct_read_refusal(mapped, "/nonexistent")


def test_extensions_are_told_by_what_they_give():
    found = useful_extensions(all_devices()[0])
    assert {"fp16", "sub-groups", "int dot product"} <= found.keys()
    assert all(type(has) is bool for has in found.values())
