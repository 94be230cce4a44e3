"""Owns the choice among OpenCL devices: which there are, what memory and kernels suit each, best first."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyopencl as cl

from mzd.errors import MzdError

log = logging.getLogger(__name__)

MemoryKind = Literal["fine_svm", "coarse_svm", "staged", "buffers"]
"""How units lie in the device's memory.

``fine_svm``: shared, no map. ``coarse_svm``: shared, the host maps what it touches. ``staged``: buffers in
the device's own memory, filled through pinned host memory; kernels follow their addresses. ``buffers``:
buffers that the host maps; kernels take them as arguments only.
"""

KernelClass = Literal["cpu", "gpu"]
"""``cpu``: a work-group is one work-item, whose vectors are the parallel part. ``gpu``: a work-group
cooperates through local memory."""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
KERNEL_CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)

INSTALL_HINT = "install an OpenCL driver, for the CPU: apt install pocl-opencl-icd"

_SVM_LEVELS = ((1 << 2, "fine_system"), (1 << 1, "fine_buffer"), (1 << 0, "coarse_buffer"))
"""Bits of CL_DEVICE_SVM_CAPABILITIES, best first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device, and one way to use it."""

    device: cl.Device
    memory_kind: MemoryKind
    kernel_class: KernelClass

    @property
    def name(self) -> str:
        """As the driver says it."""
        return str(self.device.name.strip())


def candidates(
    name: str | None = None, memory_kind: MemoryKind | None = None, kernel_class: KernelClass | None = None
) -> list[Candidate]:
    """Every device whose name contains `name` (case ignored) in every way that it offers, best first.

    `memory_kind` and `kernel_class`, where given, leave only that way.

    Raises:
        MzdError: ``device_lost``: no driver, no such device, or none with that kind of memory.
    """
    devices = all_devices()
    wanted = [device for device in devices if name is None or name.lower() in device.name.lower()]
    names = [device.name.strip() for device in devices]
    if not devices:
        raise MzdError("device_lost", f"no OpenCL device was found: {INSTALL_HINT}", devices=names)
    if not wanted:
        there_are = ", ".join(names)
        raise MzdError(
            "device_lost", f"no OpenCL device is called {name!r}; there are: {there_are}", devices=names
        )
    found = [
        Candidate(device, kind, kernel_class or default_kernel_class(device))
        for device in wanted
        for kind in memory_kinds(device)
        if memory_kind in (None, kind)
    ]
    if not found:
        raise MzdError("device_lost", f"no such device offers the memory {memory_kind!r}", devices=names)
    return found


def all_devices() -> list[cl.Device]:
    """Return the devices of all platforms, best first; a platform without one is skipped.

    Raises:
        MzdError: ``device_lost``: there is no platform.
    """
    devices: list[cl.Device] = []
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise MzdError("device_lost", f"no OpenCL platform was found: {INSTALL_HINT}") from error
    for platform in platforms:
        try:
            devices += platform.get_devices()
        except cl.Error as error:
            log.debug("platform %s has no devices: %s", platform.name, error)
    return sorted(devices, key=_preference, reverse=True)


def memory_kinds(device: cl.Device) -> tuple[MemoryKind, ...]:
    """What `device` offers, best first.

    On a device with memory of its own, shared memory is two copies and dear to allocate: staging first.
    """
    level = svm_level(device)
    shared: list[MemoryKind] = ["fine_svm"] if level.startswith("fine") else []
    shared += ["coarse_svm"] if level != "none" else []
    if device.host_unified_memory:
        return (*shared, "buffers", "staged")
    return ("staged", *shared, "buffers")


def default_kernel_class(device: cl.Device) -> KernelClass:
    """The kernels for its type."""
    return "cpu" if device.type & cl.device_type.CPU else "gpu"


def memory_reason(device: cl.Device, kind: MemoryKind) -> str:
    """Why `device` would use that kind, for people."""
    own = "" if device.host_unified_memory else "the device has memory of its own; "
    reasons: dict[MemoryKind, str] = {
        "fine_svm": "shared with the host without a map",
        "coarse_svm": "shared with the host, which maps what it touches",
        "staged": "filled through pinned memory, and kernels can follow addresses in it",
        "buffers": "mapped by the host, for want of shared memory that works",
    }
    return own + reasons[kind]


def svm_level(device: cl.Device) -> str:
    """Name the best shared memory: ``none``, ``coarse_buffer``, ``fine_buffer`` or ``fine_system``."""
    try:
        capabilities: Any = device.svm_capabilities
    except cl.Error:  # OpenCL 1.2 does not know the question
        return "none"
    return next((name for bit, name in _SVM_LEVELS if capabilities & bit), "none")


def _preference(device: cl.Device) -> tuple[bool, bool, int]:
    """Rank: a GPU, since it leaves the cores to the restore; memory shared with the host; width."""
    is_gpu = bool(device.type & cl.device_type.GPU)
    return is_gpu, bool(device.host_unified_memory), device.max_compute_units
