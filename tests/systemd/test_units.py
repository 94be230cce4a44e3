"""The unit files: clean for systemd-analyze, and in step with what the daemon does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mzd.daemon import main
from mzd.daemon.config import Config, load_config
from mzd.model.library import models_directory
from mzd.rpc.endpoint import SYSTEM_SOCKET
from mzd.rpc.limits import Limits

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"
NEWER_KEYS = {"MemoryPressureWatch": 254}
"""Keys, and the version of systemd that brought them."""

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def settings(name: str) -> dict[str, list[str]]:
    """{'Section.Key': values in order} of a unit file."""
    section, found = "", {}
    for line in (UNITS / name).read_text().splitlines():
        if header := re.fullmatch(r"\[(\w+)\]", line):
            section = header[1]
        elif entry := re.match(r"(\w+)=(.*)", line):
            found.setdefault(f"{section}.{entry[1]}", []).append(entry[2])
    return found


SERVICE = settings("mzd.service")
SOCKET = settings("mzd.socket")


def only(found: dict[str, list[str]], key: str) -> str:
    (value,) = found[key]
    return value


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|min)", text).groups()
    return float(number) * {"s": 1, "min": 60}[unit]


# What systemd says of them


def systemd_version() -> int:
    text = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"systemd (\d+)", text)[1])


def installed_copy(directory: Path) -> list[Path]:
    """The units as this machine can judge them: a program that exists, no key that is too new for it."""
    too_new = [key for key, version in NEWER_KEYS.items() if version > systemd_version()]
    copies = []
    for unit in (UNITS / "mzd.service", UNITS / "mzd.socket"):
        lines = unit.read_text().replace("/opt/mzd/bin/mzd", sys.executable).splitlines()
        kept = [line for line in lines if line.partition("=")[0] not in too_new]
        copies.append(directory / unit.name)
        copies[-1].write_text("\n".join(kept) + "\n")
    return copies


@needs_systemd_analyze
def test_systemd_has_nothing_to_say(tmp_path):
    verified = subprocess.run(
        ["systemd-analyze", "verify", *installed_copy(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


@needs_systemd_analyze
def test_exposure_stays_low(tmp_path):
    service, _ = installed_copy(tmp_path)
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(service)]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout[-2000:]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_the_user_can_be_made(tmp_path):
    command = ["systemd-sysusers", "--dry-run", f"--root={tmp_path}", "--inline"]
    lines = [
        line for line in (UNITS / "mzd.sysusers.conf").read_text().splitlines() if not line.startswith("#")
    ]
    made = subprocess.run([*command, *lines], capture_output=True, text=True, check=True)
    assert "mzd" in made.stdout + made.stderr


# What the daemon needs of them


def test_the_socket_is_where_clients_look():
    assert only(SOCKET, "Socket.ListenStream") == SYSTEM_SOCKET
    assert only(SOCKET, "Socket.SocketMode") == "0660"
    # systemd removes a service's runtime directory when it stops, and with it the socket.
    assert "Service.RuntimeDirectory" not in SERVICE


def test_members_of_the_sockets_group_may_use_the_daemon():
    config_path = only(SERVICE, "Service.ExecStart").split("--config ")[1]
    readme = (UNITS / "README.md").read_text()
    (source,) = re.findall(rf"(\S+\.toml) {re.escape(config_path)}", readme)
    assert load_config(ROOT / source, {}).socket_group == only(SOCKET, "Socket.SocketGroup")


def test_state_and_models_lie_in_the_state_directory(monkeypatch):
    directory = Path("/var/lib") / only(SERVICE, "Service.StateDirectory")
    monkeypatch.setenv("STATE_DIRECTORY", str(directory))
    assert Config().state_directory == directory
    environment = dict(value.split("=", 1) for value in SERVICE["Service.Environment"])
    expanded = {name: value.replace("%S", "/var/lib") for name, value in environment.items()}
    assert models_directory(expanded) == directory / "models"


def test_there_is_time_to_save_contexts():
    saying_goodbye_s = Limits().farewell_s + main.SAVE_DEADLINE_S
    assert seconds(only(SERVICE, "Service.TimeoutStopSec")) > saying_goodbye_s


def test_the_gpu_and_the_kernels_figures_stay_visible():
    assert only(SERVICE, "Service.DevicePolicy") == "closed"
    assert {"char-drm rw", "/dev/mali0 rw", "/dev/kgsl-3d0 rw"} <= set(SERVICE["Service.DeviceAllow"])
    assert {"Service.PrivateDevices", "Service.ProcSubset", "Service.MemoryDenyWriteExecute"}.isdisjoint(
        SERVICE
    )
