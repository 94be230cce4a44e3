"""Compiled kernels: thrown away after a start that died or a program that does not build, and not oftener."""

from __future__ import annotations

import errno
import logging
import os

import pytest

from mzd.daemon.kernel_cache import KernelCache, check_writable
from mzd.daemon.refused_devices import Refusal
from mzd.errors import MzdError

REFUSAL = Refusal("device", "fine_svm", "cpu", "", "building embedding.cl failed")
DAMAGED = MzdError("internal", "building embedding.cl failed", opencl_error="BUILD_PROGRAM_FAILURE")


class DiedError(Exception):
    """The process ended here: nothing after it ran."""


@pytest.fixture
def path(tmp_path):
    """A cache with a program of each kind of driver, and the measured choices."""
    (tmp_path / "pocl" / "AB").mkdir(parents=True)
    (tmp_path / "pocl" / "AB" / "kernel.so").write_bytes(b"code")
    (tmp_path / "other.bin").write_bytes(b"code")
    (tmp_path / "products.json").write_text("{}")
    return tmp_path


def die(path, monkeypatch):
    """A start that ends in the middle: its note stays."""
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        with pytest.raises(DiedError), KernelCache(path).in_use():
            raise DiedError


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_start_that_ended_well_or_was_refused_keeps_the_kernels(path):
    with KernelCache(path).in_use():
        pass
    with pytest.raises(MzdError), KernelCache(path).in_use():
        raise MzdError("device_lost", "refused")
    with KernelCache(path).in_use():
        assert (path / "pocl" / "AB" / "kernel.so").exists()
    assert names(path) == ["other.bin", "pocl", "products.json"]


def test_a_start_that_died_costs_the_kernels_and_not_the_choices(path, monkeypatch, caplog):
    die(path, monkeypatch)
    with KernelCache(path).in_use():
        assert "may be damaged" in caplog.text
        assert names(path / "pocl") == []
    assert names(path) == ["pocl", "products.json"]


def test_a_start_that_dies_again_keeps_what_it_compiled(path, monkeypatch):
    """Else a start that is killed for taking long would never get further."""
    for kept in (True, False, True, False):
        (path / "pocl" / "new.so").write_bytes(b"code")
        die(path, monkeypatch)
        assert (path / "pocl" / "new.so").exists() is kept


def test_what_an_interrupted_discarding_left_is_removed(path):
    (path / "discarded" / "pocl").mkdir(parents=True)
    KernelCache(path).empty()
    assert names(path) == ["pocl", "products.json"]


@pytest.mark.parametrize("name", ["BUILD_PROGRAM_FAILURE", "INVALID_KERNEL_NAME"])
def test_a_program_that_does_not_build_empties_the_cache_once(path, name):
    cache = KernelCache(path)
    error = MzdError("internal", "failed", opencl_error=name)
    assert cache.empty_after(REFUSAL, error)
    assert names(path / "pocl") == []
    assert not cache.empty_after(REFUSAL, error)


def test_a_refusal_that_is_known_or_no_damage_keeps_the_kernels(path):
    assert not KernelCache(path, (REFUSAL,)).empty_after(REFUSAL, DAMAGED)
    assert not KernelCache(path).empty_after(REFUSAL, MzdError("device_lost", "computes wrongly"))
    assert names(path / "pocl") == ["AB"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_directory_that_cannot_be_written_is_named(path, monkeypatch, code):
    check_writable(path)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MzdError, match=str(path)) as raised:
        check_writable(path)
    assert raised.value.code == "invalid_params"
    assert os.strerror(code) in raised.value.message
    assert names(path) == ["other.bin", "pocl", "products.json"]


def test_warnings_name_the_refusal(path, caplog):
    caplog.set_level(logging.WARNING)
    KernelCache(path).empty_after(REFUSAL, DAMAGED)
    assert "embedding.cl" in caplog.text
