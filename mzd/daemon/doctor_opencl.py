"""Owns what `mzd doctor` says of OpenCL: what is missing, how devices would be used, what would be faster."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mzd.daemon.config import Config
from mzd.daemon.opencl_probe import DeviceReport, OpenClReport
from mzd.daemon.refused_devices import Refusal

GPU_NODES: Final = ("dev/dri/renderD128", "dev/mali0", "dev/kgsl-3d0", "dev/nvidia0")
"""Where drivers show a GPU, whether or not it has an OpenCL library."""

HIDING_VARIABLES: Final = ("OCL_ICD_VENDORS", "OCL_ICD_FILENAMES", "POCL_DEVICES")
"""By these an environment says which drivers and devices there are."""

INSTALL: Final = "install a driver; for the CPU: apt install pocl-opencl-icd"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `advice` says what to do where `ok` is False."""

    name: str
    ok: bool
    detail: str
    advice: str


def broken_driver(error: Exception) -> Check:
    """The probe did not come back."""
    return Check(
        "OpenCL",
        False,
        f"OpenCL was tried in another process: {error}",
        "a driver is broken: set OCL_ICD_VENDORS to the .icd file of one that works, remove the others",
    )


def opencl_checks(
    report: OpenClReport,
    refusals: tuple[Refusal, ...],
    config: Config,
    environment: Mapping[str, str] = os.environ,
) -> list[Check]:
    """The loader, the drivers it finds, the device that the daemon would take, what it refused last."""
    drivers_advice = _drivers_advice(environment)
    return [
        Check(
            "OpenCL loader",
            bool(report.loader),
            report.loader or report.problem,
            "pip install pyopencl, which brings a loader, or apt install ocl-icd-libopencl1",
        ),
        Check("OpenCL drivers", bool(report.devices), _device_list(report), drivers_advice),
        Check(
            "OpenCL device",
            bool(report.chosen),
            _chosen(report),
            _configuration_advice(report, config) or drivers_advice,
        ),
        Check(
            "self-test",
            not refusals,
            "; ".join(map(str, refusals)) or "the last start refused no device",
            "another driver, or a newer one, may compute right; the next start tries again",
        ),
    ]


def _drivers_advice(environment: Mapping[str, str]) -> str:
    """A variable that hides drivers comes before a driver that is missing."""
    hiding = [f"{name}={environment[name]}" for name in HIDING_VARIABLES if name in environment]
    return f"the environment has {', '.join(hiding)}: unset it; or {INSTALL}" if hiding else INSTALL


def _configuration_advice(report: OpenClReport, config: Config) -> str:
    """Which keys to change where the configuration leaves out all that there is; empty if it does not."""
    if not report.devices or not config.narrowing:
        return ""
    keys = ", ".join(f'{key} = "{value}"' for key, value in config.narrowing.items())
    names = ", ".join(device.name for device in report.devices)
    return f"change or leave out {keys} in the configuration; there are the devices: {names}"


def _device_list(report: OpenClReport) -> str:
    devices = [
        f"{device.platform} {device.driver}: {device.name}, SVM {device.svm_level}"
        for device in report.devices
    ]
    return "; ".join(devices) or "none"


def _chosen(report: OpenClReport) -> str:
    device = report.chosen_device
    if device is None:
        return report.problem
    return f"{device.name}: memory {device.memory}, {device.kernels} kernels"


def describe_device(device: DeviceReport) -> Iterator[str]:
    """Lines for people: what it is, and how it would be used."""
    shared = "memory shared with the host" if device.shares_memory else "memory of its own"
    yield f"{device.name} ({device.platform} {device.driver})"
    yield f"{device.compute_units} compute units, SVM {device.svm_level}, {shared}"
    yield (
        f"memory {_mb(device.memory_bytes)}, largest allocation {_mb(device.allocation_bytes_max)}, "
        f"local memory {device.local_memory_bytes // 1024} KiB"
    )
    yield ", ".join(f"{what}: {'yes' if has else 'no'}" for what, has in device.extensions.items())
    if device.memory:
        yield f"would use memory {device.memory}: {device.memory_reason}"
        yield f"would use {device.kernels} kernels: {device.kernels_reason}"
        yield f"pointer lists: {device.pointer_lists}"
        yield f"direct reads into units: {device.direct_reads or 'yes'}"
    else:
        yield f"would not be used: {device.memory_reason}"
    yield from (f"cannot be opened with {failure}" for failure in device.failures)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


# What would be faster


def speed_hints(
    config: Config,
    report: OpenClReport,
    *,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    quantised: bool = False,
) -> list[str]:
    """What would make the daemon faster here; nothing of it is missing.

    Args:
        root: where /dev is.
        quantised: whether the configured model's weights are.
    """
    device = report.chosen_device
    if device is None:
        return []
    hints = [*_gpu_hints(report, device, root), *_memory_hints(device), *_pocl_hints(device, environment)]
    if quantised and device.is_cpu and config.activations == "f32":
        hints.append(
            'activations = "int8" multiplies quantised weights as integers, at the cost of exactness'
        )
    return hints


def _gpu_hints(report: OpenClReport, chosen: DeviceReport, root: Path) -> Iterator[str]:
    if not chosen.is_cpu:
        return
    unused = [device.name for device in report.devices if not device.is_cpu]
    nodes = [f"/{node}" for node in GPU_NODES if (root / node).exists()]
    if unused:
        yield f"a GPU would leave the cores to the restore, but {', '.join(unused)} cannot be used"
    elif nodes:
        yield f"there is a GPU ({', '.join(nodes)}), but no OpenCL driver for it that this user may use"


def _memory_hints(device: DeviceReport) -> Iterator[str]:
    if device.shares_memory and device.memory == "coarse_svm":
        yield "fine-grain SVM would save a map of each unit; another driver of the device may offer it"
    if device.memory == "buffers":
        yield "SVM would save a map of each unit and launches of attention; a newer driver may offer it"
    if device.direct_reads:
        yield f"reads from flash pass through a copy ({device.direct_reads})"


def _pocl_hints(device: DeviceReport, environment: Mapping[str, str]) -> Iterator[str]:
    if device.platform != "Portable Computing Language":
        return
    if environment.get("POCL_AFFINITY") == "0":
        yield "POCL_AFFINITY=0 lets workers wander between cores: unset it, a small matrix takes a third less"
    version = re.match(r"(\d+)\.(\d+)", device.driver)
    if version is None:
        return
    if (int(version[1]), int(version[2])) < (3, 1):
        yield f"PoCL {device.driver} calls a function for each product: 3.1 is 3 to 7 times as fast"
    elif int(version[1]) < 6:
        yield f"PoCL {device.driver} is an old one: version 6 and later have a newer compiler, and sub-groups"
