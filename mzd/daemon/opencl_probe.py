"""Owns the look at OpenCL from a process of its own: a driver that crashes takes only that process along.

`python -m mzd.daemon.opencl_probe` is the child: its last line of output is a report as JSON.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mzd.errors import MzdError

if TYPE_CHECKING:
    import pyopencl

PROBE_COMMAND = (sys.executable, "-m", "mzd.daemon.opencl_probe")
PROBE_TIMEOUT_S = 60.0
"""A first start of a driver compiles and loads much; one that takes longer hangs."""

TRIAL_BYTES = 4096


class ProbeFailedError(Exception):
    """The probe died, hung, or said nothing that can be read."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device, as its driver describes it. `svm_level`: as `OpenClDevice.svm_level`."""

    platform: str
    name: str
    driver: str
    svm_level: str


@dataclass(frozen=True, slots=True)
class OpenClReport:
    """What the loader finds.

    Attributes:
        loader: path of the OpenCL library; empty if there is none.
        chosen: the device that the daemon would take; empty if it would refuse them all.
        problem: why `loader` or `chosen` is empty.
    """

    loader: str
    devices: tuple[DeviceReport, ...]
    chosen: str
    problem: str


def probe_opencl(
    command: Sequence[str] = PROBE_COMMAND, *, timeout_s: float = PROBE_TIMEOUT_S
) -> OpenClReport:
    """Run the probe in a child process.

    Raises:
        ProbeFailedError: with what became of the child.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ProbeFailedError(f"it did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise ProbeFailedError(f"it cannot be started: {error.strerror}") from error
    if done.returncode != 0:
        raise ProbeFailedError(_death(done.returncode, done.stderr))
    return _decode_report(done.stdout)


def _death(returncode: int, stderr: str) -> str:
    if returncode < 0:
        return f"it was killed by {signal.Signals(-returncode).name}"
    last_line = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    return f"it ended with status {returncode}: {last_line.strip()}"


def _decode_report(output: str) -> OpenClReport:
    """The last line: drivers may print before it."""
    try:
        fields = json.loads(output.splitlines()[-1])
        devices = tuple(DeviceReport(**device) for device in fields.pop("devices"))
        return OpenClReport(devices=devices, **fields)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProbeFailedError(f"its report cannot be read: {error}") from error


def look() -> OpenClReport:
    """Load OpenCL into this process and ask every driver; what may crash happens here."""
    try:
        import pyopencl  # noqa: F401 - loads the loader
    except ImportError as error:
        return OpenClReport("", (), "", f"pyopencl cannot be loaded: {error}")
    from mzd.device.libopencl import libopencl

    try:
        chosen, problem = _choose(), ""
    except MzdError as error:
        chosen, problem = "", error.message
    return OpenClReport(str(libopencl()._name), tuple(_devices()), chosen, problem)


def _choose() -> str:
    """Open the device that the daemon would, and take shared memory from it once."""
    from mzd.device.opencl import OpenClDevice

    device = OpenClDevice.open()
    try:
        device.reserve_svm(TRIAL_BYTES).free()
    finally:
        device.close()
    return device.name


def _devices() -> list[DeviceReport]:
    import pyopencl as cl

    try:
        platforms = cl.get_platforms()
    except cl.Error:  # the loader's way to say that it found no driver
        return []
    reports = []
    for platform in platforms:
        try:
            reports += [_describe(platform, device) for device in platform.get_devices()]
        except cl.Error:  # a driver without its hardware
            continue
    return reports


def _describe(platform: pyopencl.Platform, device: pyopencl.Device) -> DeviceReport:
    return DeviceReport(
        platform=platform.name.strip(),
        name=device.name.strip(),
        driver=device.driver_version.strip(),
        svm_level=_svm_level(device),
    )


def _svm_level(device: pyopencl.Device) -> str:
    import pyopencl as cl

    levels = (
        (cl.device_svm_capabilities.FINE_GRAIN_SYSTEM, "fine_system"),
        (cl.device_svm_capabilities.FINE_GRAIN_BUFFER, "fine_buffer"),
        (cl.device_svm_capabilities.COARSE_GRAIN_BUFFER, "coarse_buffer"),
    )
    try:
        capabilities = device.svm_capabilities
    except cl.Error:  # OpenCL 1.2 does not know the question
        return "none"
    return next((name for bit, name in levels if capabilities & bit), "none")


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
