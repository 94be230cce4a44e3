"""Owns the look at OpenCL from a process of its own: a driver that crashes takes only that process along.

`python -m mzd.daemon.opencl_probe DEVICE MEMORY KERNELS` is the child; its arguments are the configuration's
keys of these names, and its last line of output is a report as JSON.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mzd.daemon.config import Config, load_config
from mzd.errors import MzdError

if TYPE_CHECKING:
    import pyopencl

    from mzd.device.selection import Candidate

PROBE_COMMAND = (sys.executable, "-m", "mzd.daemon.opencl_probe")
AS_CONFIGURED = "the configuration says so"
PROBE_TIMEOUT_S = 60.0
"""A first start of a driver compiles and loads much; one that takes longer hangs."""


class ProbeFailedError(Exception):
    """The probe died, hung, or said nothing that can be read."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device, as its driver describes it, and how the daemon would use it.

    Attributes:
        svm_level: as `OpenClDevice.svm_level`.
        memory: the first kind that the configuration allows and that can be opened; empty if none.
        memory_reason: why that one; or why none.
        kernels: the class of kernels.
        kernels_reason: why that one.
        pointer_lists: see `mzd.device.pointer_lists`; one sentence.
        direct_reads: why files cannot be read past the page cache right into its memory; empty if they can.
        failures: what could not be opened before it, and why.
        extensions: by what they give, whether the device has them.
        allocation_bytes_max: the largest single allocation.
    """

    platform: str
    name: str
    driver: str
    svm_level: str
    is_cpu: bool
    shares_memory: bool
    compute_units: int
    memory: str
    memory_reason: str
    kernels: str
    kernels_reason: str
    pointer_lists: str
    direct_reads: str
    failures: tuple[str, ...]
    extensions: dict[str, bool]
    local_memory_bytes: int
    allocation_bytes_max: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class OpenClReport:
    """What the loader finds.

    Attributes:
        loader: path of the OpenCL library; empty if there is none.
        devices: best first.
        chosen: the device that the daemon would take; empty if it would refuse them all.
        problem: why `loader` or `chosen` is empty.
    """

    loader: str
    devices: tuple[DeviceReport, ...]
    chosen: str
    problem: str

    @property
    def chosen_device(self) -> DeviceReport | None:
        """The first that could be opened as the configuration says."""
        return next((device for device in self.devices if device.memory), None)


def probe_opencl(
    config: Config | None = None,
    *,
    command: Sequence[str] = PROBE_COMMAND,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> OpenClReport:
    """Run the probe in a child process.

    Raises:
        ProbeFailedError: with what became of the child.
    """
    config = config or Config()
    command = (*command, config.device, config.memory, config.kernels)
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
        devices = tuple(_decode_device(device) for device in fields.pop("devices"))
        return OpenClReport(devices=devices, **fields)
    except (IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ProbeFailedError(f"its report cannot be read: {error}") from error


def _decode_device(fields: dict[str, Any]) -> DeviceReport:
    return DeviceReport(failures=tuple(fields.pop("failures")), **fields)


# The child


def look(config: Config) -> OpenClReport:
    """Load OpenCL into this process and ask every driver; what may crash happens here."""
    try:
        import pyopencl  # noqa: F401 - loads the loader
    except ImportError as error:
        return OpenClReport("", (), "", f"pyopencl cannot be loaded: {error}")
    from mzd.device.libopencl import libopencl
    from mzd.device.opencl import prepare_environment

    with tempfile.TemporaryDirectory(prefix="mzd-doctor-") as cache_dir:
        prepare_environment(Path(cache_dir))  # the trials' few kernels go with it
        devices, problem = _devices(config)
    chosen = next((device.name for device in devices if device.memory), "")
    if not problem and not chosen:
        problem = "; ".join(f"{device.name}: {why}" for device in devices for why in device.failures)
    return OpenClReport(str(libopencl()._name), devices, chosen, problem)


def _devices(config: Config) -> tuple[tuple[DeviceReport, ...], str]:
    """Every device, with the ways that the configuration allows tried; and why it allows none."""
    from mzd.daemon.device_choice import ways_to_compute
    from mzd.device.selection import all_devices

    try:
        devices = all_devices()
    except MzdError as error:
        return (), error.message
    try:
        ways, problem = ways_to_compute(config), ""
    except MzdError as error:
        ways, problem = [], error.message
    ways_of = {device: [way for way in ways if way.device == device] for device in devices}
    return tuple(_describe(device, ways_of[device], config) for device in devices), problem


def _describe(device: pyopencl.Device, ways: Sequence[Candidate], config: Config) -> DeviceReport:
    import pyopencl as cl

    from mzd.device.extensions import useful_extensions
    from mzd.device.selection import svm_level

    return DeviceReport(
        platform=device.platform.name.strip(),
        name=device.name.strip(),
        driver=device.driver_version.strip(),
        svm_level=svm_level(device),
        is_cpu=bool(device.type & cl.device_type.CPU),
        shares_memory=bool(device.host_unified_memory),
        compute_units=device.max_compute_units,
        extensions=useful_extensions(device),
        local_memory_bytes=device.local_mem_size,
        allocation_bytes_max=device.max_mem_alloc_size,
        memory_bytes=device.global_mem_size,
        **_use(ways, config),
    )


def _use(ways: Sequence[Candidate], config: Config) -> dict[str, Any]:
    """What the first way that can be opened says of itself, and what failed before it."""
    import pyopencl as cl

    failures: list[str] = []
    for way in ways:
        try:
            return _opened(way, config) | {"failures": tuple(failures)}
        except (MzdError, cl.Error) as error:
            failures.append(f"memory {way.memory_kind}: {str(error).splitlines()[0]}")
    reason = "it cannot be opened" if failures else "the configuration leaves it out"
    unused = dict.fromkeys(("memory", "kernels", "kernels_reason", "pointer_lists", "direct_reads"), "")
    return unused | {"memory_reason": reason, "failures": tuple(failures)}


def _opened(way: Candidate, config: Config) -> dict[str, Any]:
    from mzd.device.direct_reads import direct_read_refusal
    from mzd.device.opencl import OpenClDevice
    from mzd.device.selection import default_kernel_class, memory_reason

    a_cpu = "a" if default_kernel_class(way.device) == "cpu" else "no"
    own = {"memory": memory_reason(way.device, way.memory_kind), "kernels": f"it is {a_cpu} CPU"}
    reasons = own | dict.fromkeys(config.narrowing, AS_CONFIGURED)
    device = OpenClDevice(way, cache_dir=None)
    try:
        return {
            "memory": way.memory_kind,
            "memory_reason": reasons["memory"],
            "kernels": way.kernel_class,
            "kernels_reason": reasons["kernels"],
            "pointer_lists": device.pointer_lists.reason,
            "direct_reads": direct_read_refusal(device),
        }
    finally:
        device.close()


if __name__ == "__main__":
    given = dict(zip(("device", "memory", "kernels"), sys.argv[1:], strict=True))
    print(json.dumps(asdict(look(load_config(None, given)))))
