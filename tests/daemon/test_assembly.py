"""The start: what is opened, what is refused on the way, and that the end closes all of it."""

from __future__ import annotations

import errno
import inspect
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import mzd.device.opencl
from mzd.daemon import assembly
from mzd.daemon.assembly import activations_of, open_everything
from mzd.daemon.config import Config, ThreadsConfig
from mzd.daemon.refused_devices import last_refusals
from mzd.errors import MzdError
from mzd.memory.context_directory import ContextDirectory
from tests.device.test_self_test import broken
from tests.paths.harness import CONFIG, alone
from tests.reference.loaded_model import LoadedModel

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("MZD_HOME", str(tmp_path / "home"))
    # Where PoCL looks by default: kernels of other tests are there, and a state of its own would have none.
    kernels = os.environ.get("POCL_CACHE_DIR", str(Path.home() / ".cache" / "pocl" / "kcache"))
    monkeypatch.setenv("POCL_CACHE_DIR", kernels)
    return Config(model=str(FIXTURES / "llama-Q4_1.gguf"), state=str(tmp_path / "state"), huge_pages=False)


@pytest.fixture
def plant(monkeypatch):
    """Plant a wrong kernel in the devices whose memory is of one of these kinds."""
    wrong_source = broken("elementwise", "1.0f + e", "1.001f + e")
    right_source = mzd.device.opencl.kernel_source
    open_device = assembly.OpenClDevice

    def use(kinds):
        def planted(candidate, **options):
            source = wrong_source if candidate.memory_kind in kinds else right_source
            monkeypatch.setattr(mzd.device.opencl, "kernel_source", source)
            return open_device(candidate, **options)

        monkeypatch.setattr(assembly, "OpenClDevice", planted)

    return use


@pytest.mark.parametrize(
    ("wanted", "kernel_class", "expected"),
    [("auto", "cpu", "int8"), ("auto", "gpu", "f32"), ("int8", "gpu", "int8"), ("f32", "cpu", "f32")],
)
def test_activations_are_rounded_on_a_cpu_unless_told_otherwise(wanted, kernel_class, expected):
    device = SimpleNamespace(kernel_class=kernel_class)
    assert activations_of(Config(activations=wanted), device) == expected


def test_what_answers_are_compared_in_is_exact():
    """Fixtures, and answers before and after an eviction."""
    assert Config().activations == "auto"
    assert CONFIG.activations == "f32"
    assert inspect.signature(LoadedModel).parameters["activations"].default == "f32"


async def test_a_start_goes_past_a_device_that_is_wrong(config, plant):
    plant(["fine_svm"])
    async with open_everything(config) as opened:
        assert opened.device.memory_kind == "coarse_svm"
        (refusal,) = opened.chosen.refusals
        assert refusal.kernel == "gated_mul, silu"
        assert last_refusals(config.state_directory) == (refusal,)
        assert opened.text.tokenizer.vocab_size == opened.parts.store.index.config.vocab_size
        assert opened.text.template is not None


async def test_a_start_with_nothing_left_fails_and_the_doctor_will_know_why(config, plant):
    plant(["fine_svm", "coarse_svm", "staged", "buffers"])
    with pytest.raises(MzdError, match="no device computes right") as raised, alone():
        async with open_everything(config):
            pass
    assert raised.value.code == "device_lost"
    kinds = [refusal.memory for refusal in last_refusals(config.state_directory)]
    assert sorted(kinds) == ["buffers", "coarse_svm", "fine_svm", "staged"]


async def test_a_configured_kind_of_memory_is_not_replaced(config, plant):
    plant(["coarse_svm"])
    narrowed = Config(model=config.model, state=config.state, memory="coarse_svm", huge_pages=False)
    with pytest.raises(MzdError, match=r'leave out memory = "coarse_svm"'), alone():
        async with open_everything(narrowed):
            pass


async def test_a_context_that_is_too_long_is_refused_before_the_device_is_opened(config, plant, monkeypatch):
    monkeypatch.setattr(assembly, "choose_device", None)
    too_long = Config(model=config.model, state=config.state, context=1 << 30)
    with pytest.raises(MzdError, match="the model was made for"):
        async with open_everything(too_long):
            pass


async def test_cores_that_there_are_not_are_refused_before_the_device_is_opened(config, monkeypatch):
    monkeypatch.setattr(assembly, "choose_device", None)
    config = replace(config, threads=ThreadsConfig(cores=(0, 9999)))
    with pytest.raises(MzdError, match=r"threads\.cores names 9999") as raised:
        async with open_everything(config):
            pass
    assert raised.value.code == "invalid_params"


async def test_a_state_that_another_daemon_uses_is_refused_before_its_kernels_are_touched(
    config, monkeypatch
):
    monkeypatch.setattr(assembly, "choose_device", None)
    other = ContextDirectory(config.state_directory / "contexts")
    with pytest.raises(MzdError) as raised:
        async with open_everything(config):
            pass
    other.close()
    assert raised.value.code == "busy"
    assert list((config.state_directory / "kernels").iterdir()) == []


async def test_a_state_that_cannot_be_written_is_refused_before_the_device_is_opened(config, monkeypatch):
    monkeypatch.setattr(assembly, "choose_device", None)

    fallocate = os.posix_fallocate

    def full(fd, *extent):
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(config.state_directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(fd, *extent)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MzdError, match="cannot be written: No space left") as raised:
        async with open_everything(config):
            pass
    assert raised.value.code == "invalid_params"
