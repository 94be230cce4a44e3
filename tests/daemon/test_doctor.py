"""The doctor on machines that lack one thing each, and a probe that dies in every way."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mzd.daemon import doctor
from mzd.daemon.config import Config
from mzd.daemon.doctor import ModelNeeds, diagnose
from mzd.daemon.opencl_probe import AS_CONFIGURED, OpenClReport, ProbeFailedError, look, probe_opencl
from mzd.daemon.refused_devices import keep_refusals
from mzd.model.library import ModelLibrary
from mzd.policy.units import CHUNK_TOKENS
from tests.daemon.opencl_reports import REFUSAL, a_report

FIXTURES = Path(__file__).parents[1] / "fixtures"
PSI = """some avg10=1.50 avg60=0.00 avg300=0.00 total=612418
full avg10=0.25 avg60=0.00 avg300=0.00 total=26505
"""
NEEDS = ModelNeeds(weights_bytes=100_000_000, kv_bytes=50_000_000, context_length=4096)


def report(_config):
    return a_report()


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without anything, on a machine with everything."""
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "STATE_DIRECTORY", "MEMORY_PRESSURE_WATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MZD_HOME", str(tmp_path / "mzd"))
    monkeypatch.setenv("MZD_SOCKET", str(tmp_path / "run" / "mzd.sock"))
    return lay_out(
        tmp_path / "root",
        {doctor.PSI_FILE: PSI, doctor.HUGE_PAGES_FILE: "always [madvise] never\n"},
    )


def by_name(checks):
    """By their names, of which none comes twice."""
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_only_the_model_is_missing_on_a_fresh_machine(home):
    checks = by_name(diagnose(root=home, probe=report).checks)
    assert [name for name, check in checks.items() if not check.ok] == ["model"]
    assert checks["model"].advice == "mzd pull smollm2-135m"
    assert checks["OpenCL drivers"].detail == "Portable Computing Language 6.0: pthread-cpu, SVM fine_buffer"
    assert "some avg10 1.5 %, full avg10 0.25 %" in checks["memory pressure"].detail


def test_every_lack_comes_with_advice(tmp_path, home, monkeypatch):
    monkeypatch.setenv("MZD_SOCKET", "/" + 200 * "x")
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    config = Config(state=str(blocked / "state"), lock_memory=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    monkeypatch.setattr(doctor, "KNOWN_MODELS", {})
    nothing = a_report(loader="", devices=(), chosen="")
    checks = diagnose(config, root=tmp_path / "empty", probe=lambda _: nothing).checks
    missing = [check for check in checks if not check.ok]
    assert all(check.advice and "\n" not in check.advice for check in missing)
    assert {check.name for check in missing} >= {
        "OpenCL loader", "OpenCL drivers", "OpenCL device", "huge pages", "memory pressure",
        "state directory", "direct I/O", "memory lock", "model", "socket",
    }  # fmt: skip


def test_nothing_is_left_behind(tmp_path, home):
    diagnose(Config(state=str(tmp_path / "state")), root=home, probe=report)
    assert not (tmp_path / "state").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_one_wrong_byte_of_the_weights_is_found(tmp_path, home):
    source = FIXTURES / "llama-Q8_0.gguf"
    installed = ModelLibrary(tmp_path / "mzd" / "models").import_file(source, "small")
    data = bytearray(installed.store_path.read_bytes())
    data[8192] ^= 1
    installed.store_path.write_bytes(data)
    config = Config(model="small")
    models = installed.directory.parent
    check = doctor.check_model(config, models, doctor._model_needs(config, models))
    assert not check.ok
    assert "damaged: layer 0" in check.detail
    assert check.advice == f"mzd import {source} --name small"


def test_an_installed_model_gives_the_figures(tmp_path, home):
    installed = ModelLibrary(tmp_path / "mzd" / "models").import_file(FIXTURES / "llama-Q8_0.gguf", "small")
    config = Config(model="small", context=CHUNK_TOKENS)
    needs = doctor._model_needs(config, installed.directory.parent)
    assert needs is not None
    assert 0 < needs.weights_bytes < installed.store_path.stat().st_size
    assert needs.kv_bytes > 0
    checks = by_name(diagnose(config, root=home, probe=report).checks)
    assert checks["model"].ok
    os.truncate(installed.store_path, 100)
    assert not by_name(diagnose(config, root=home, probe=report).checks)["model"].ok


def test_an_old_python_is_refused():
    assert doctor.check_python((3, 11, 0)).ok
    assert doctor.check_python((4, 0, 0)).ok
    assert not doctor.check_python((3, 10, 9)).ok


def test_the_reason_of_the_fallback_is_said():
    assert "no compiler" in doctor.check_native("numpy", "no compiler").detail
    assert not doctor.check_native("numpy", "no compiler").ok
    assert doctor.check_native("c", None).ok


@pytest.mark.parametrize(
    ("modes", "ok"), [("[always] madvise never", True), ("always madvise [never]", False)]
)
def test_huge_pages(tmp_path, modes, ok):
    check = doctor.check_huge_pages(lay_out(tmp_path, {doctor.HUGE_PAGES_FILE: modes + "\n"}))
    assert (check.ok, check.detail) == (ok, modes)


def test_pressure_turned_off_on_purpose_is_no_lack(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMORY_PRESSURE_WATCH", "/dev/null")
    assert doctor.check_psi(tmp_path).ok
    monkeypatch.delenv("MEMORY_PRESSURE_WATCH")
    check = doctor.check_psi(tmp_path)
    assert not check.ok
    assert "psi=1" in check.advice


def memory_group(root: Path, limit: str) -> Path:
    group = "sys/fs/cgroup/mzd.service"
    return lay_out(
        root,
        {
            "proc/self/cgroup": "0::/mzd.service\n",
            "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n",
            f"{group}/memory.current": "20000000\n",
            f"{group}/memory.max": f"{limit}\n",
            f"{group}/memory.stat": "inactive_file 0\nactive_file 0\n",
        },
    )


@pytest.mark.parametrize(("limit", "ok"), [("max", True), ("120000000", True), ("119999999", False)])
def test_the_memory_group_must_hold_the_weights(tmp_path, limit, ok):
    check = doctor.check_memory_group(memory_group(tmp_path, limit), NEEDS)
    assert check.ok is ok
    assert "mzd.service" in check.detail


@pytest.mark.parametrize(
    ("limit_bytes", "lock", "ok"),
    [
        (resource.RLIM_INFINITY, True, True),
        (150_000_000, True, True),
        (149_999_999, True, False),
        (0, False, True),
    ],
)
def test_memory_lock_is_wanted_only_when_it_is_on(monkeypatch, limit_bytes, lock, ok):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit_bytes, limit_bytes))
    check = doctor.check_memory_lock(Config(lock_memory=lock), NEEDS)
    assert check.ok is ok
    assert "LimitMEMLOCK=150000000 " in check.advice
    assert "ulimit -l 146485" in check.advice


def test_a_file_system_without_direct_io_is_named(tmp_path, monkeypatch):
    real_open = os.open

    def without_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", without_direct)
    assert not doctor.check_direct_io(tmp_path).ok
    assert list(tmp_path.iterdir()) == []


def test_too_little_space(tmp_path):
    assert doctor.check_free_space("x", tmp_path / "to" / "come", 0).ok
    assert not doctor.check_free_space("x", tmp_path / "to" / "come", 1 << 62).ok


def test_a_directory_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor.check_writable("x", tmp_path / "new" / "dir").ok
    assert not doctor.check_writable("x", tmp_path / "file" / "dir").ok


def test_a_socket_that_somebody_serves_is_fine(tmp_path):
    path = tmp_path / "mzd.sock"
    assert doctor.check_socket(path).detail == str(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert "a daemon listens" in doctor.check_socket(path).detail


# The probe


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import sys; sys.exit('no driver here')", "status 1: no driver here"),
        ("pass", "cannot be read"),
        ("print('{')", "cannot be read"),
        ("print('[]')", "cannot be read"),
        ("print('{\"devices\": [{}]}')", "cannot be read"),
    ],
)
def test_a_probe_that_dies_is_told_of(code, said):
    with pytest.raises(ProbeFailedError, match=said):
        probe_opencl(command=python(code))


def test_a_probe_that_hangs_or_is_missing_is_told_of():
    with pytest.raises(ProbeFailedError, match="did not end"):
        probe_opencl(command=python("import time; time.sleep(60)"), timeout_s=0.1)
    with pytest.raises(ProbeFailedError, match="cannot be started"):
        probe_opencl(command=("/nonexistent/python",))


def test_what_drivers_print_is_passed_over():
    fields = {"loader": "l", "devices": [], "chosen": "", "problem": "p"}
    code = f"print('driver 1.0'); print({json.dumps(fields)!r})"
    assert probe_opencl(command=python(code)) == OpenClReport("l", (), "", "p")


def test_a_crash_becomes_one_check_and_the_rest_goes_on(home):
    def crash(_config):
        raise ProbeFailedError("it was killed by SIGSEGV")

    checks = by_name(diagnose(root=home, probe=crash).checks)
    assert not checks["OpenCL"].ok
    assert "SIGSEGV" in checks["OpenCL"].detail
    assert "OCL_ICD_VENDORS" in checks["OpenCL"].advice
    assert "socket" in checks


def test_this_machine_has_a_device():
    found = probe_opencl()
    assert found == look(Config())
    assert found.chosen_device is not None
    assert found.chosen == found.chosen_device.name
    assert Path(found.loader).exists()


def test_the_configuration_narrows_what_is_tried():
    found = probe_opencl(Config(memory="buffers", kernels="gpu"))
    assert {(device.memory, device.kernels) for device in found.devices} == {("buffers", "gpu")}
    assert {(device.memory_reason, device.kernels_reason) for device in found.devices} == {
        (AS_CONFIGURED, AS_CONFIGURED)
    }


def test_a_configuration_that_leaves_nothing_is_told_of():
    found = probe_opencl(Config(device="nothing is called so"))
    assert found.chosen == ""
    assert "change or leave out" in found.problem
    assert "install" not in found.problem
    assert all(device.memory_reason == "the configuration leaves it out" for device in found.devices)


def test_the_doctor_loads_no_driver():
    code = "import sys, mzd.daemon.doctor; sys.exit('pyopencl' in sys.modules)"
    assert subprocess.run(python(code), check=False).returncode == 0


def test_what_the_last_start_refused_is_shown(tmp_path, home):
    config = Config(state=str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    keep_refusals(config.state_directory, [REFUSAL])
    found = diagnose(config, root=home, probe=report)
    assert found.refused == (REFUSAL,)
    check = by_name(found.checks)["self-test"]
    assert not check.ok
    assert "computes embed wrongly" in check.detail
    assert not found.healthy


@pytest.mark.parametrize(("tokens", "ok"), [(0, True), (4096, True), (4097, False)])
def test_a_context_longer_than_the_model_is_missed(tokens, ok):
    check = doctor.check_context(Config(context=tokens), NEEDS)
    assert check.ok == ok
    assert "4096" in check.detail
    assert "4096" in check.advice
