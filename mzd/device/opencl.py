"""Owns the OpenCL device: its context, its one in-order queue, its programs and its shared memory."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from mzd.device.kernel import BoundKernel
from mzd.device.libopencl import check, libopencl, opencl_error
from mzd.device.svm import ScratchBuffer, SvmReservation
from mzd.device.waiter import EventWaiter
from mzd.errors import MzdError
from mzd.kernels import kernel_source

log = logging.getLogger(__name__)

_SVM_LEVELS = ((1 << 2, "fine_system"), (1 << 1, "fine_buffer"), (1 << 0, "coarse_buffer"))
"""Bits of CL_DEVICE_SVM_CAPABILITIES, best first."""

_BUILD_OPTIONS = "-cl-denorms-are-zero -w"
"""On x86 a denormal result costs some 150 cycles, and the softmax of a head whose scores lie far apart is
full of them: attention took 19 times as long. ``-w`` because PoCL prints the number of warnings, such as of a
loop not unrolled, on our stderr; what is wrong with a kernel shows in the self-test."""

_INSTALL_HINT = "install an OpenCL driver, for the CPU: apt install pocl-opencl-icd"

RESERVATION_BYTES = 1 << 30
"""Large buffers fail on drivers that announce them; 1 GiB is taken everywhere."""

Define = int | float | str


class Program:
    """A built program; kernels come from `OpenClDevice.kernel`."""

    def __init__(self, program: cl.Program, source_name: str) -> None:
        self.source_name = source_name
        self._program = program

    def create_kernel(self, name: str) -> cl.Kernel:
        """Return a new kernel object: each call site has its own, with its own arguments."""
        try:
            return cl.Kernel(self._program, name)
        except cl.Error as error:
            raise opencl_error(error.code, f"clCreateKernel({self.source_name}.cl: {name})") from error


class OpenClDevice:
    """One device with one in-order queue. Made by `open`; `close` ends it.

    Attributes:
        name, driver: as the driver says them.
        compute_units: cores of a CPU, or a GPU's equivalent.
        svm_level: ``none``, ``coarse_buffer``, ``fine_buffer`` or ``fine_system``.
        unified_memory: whether host and device share their memory.
        reservation_bytes_max: the longest piece of shared memory to reserve at once.
        float_lanes: floats of the vectors that suit the device, 8 or 16.
    """

    def __init__(self, device: cl.Device, *, cache_dir: Path | None) -> None:
        self.name: str = device.name.strip()
        self.driver: str = f"{device.platform.name.strip()} {device.driver_version.strip()}"
        self.compute_units: int = device.max_compute_units
        self.svm_level = _svm_level(device)
        self.unified_memory = bool(device.host_unified_memory)
        self.float_lanes = 16 if device.native_vector_width_float >= 16 else 8
        self._cache_dir = None if cache_dir is None else str(cache_dir)
        self.reservation_bytes_max = int(min(device.max_mem_alloc_size, RESERVATION_BYTES))
        self._context = cl.Context([device])
        self._queue = cl.CommandQueue(self._context, device)
        self._queue_handle: int = self._queue.int_ptr
        self._programs: dict[tuple[str, str], Program] = {}
        self._reservations: dict[int, SvmReservation] = {}
        self._svm_pointers: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._waiter = EventWaiter(self.name)

    @classmethod
    def open(cls, name: str | None = None, *, cache_dir: Path | None = None) -> OpenClDevice:
        """Open the device whose name contains `name` (case ignored), or without a name the best one.

        Sets ``POCL_AFFINITY=1`` unless the environment says otherwise: PoCL reads it once, when its
        platform loads, and with its workers pinned a small matrix takes two thirds of the time. With
        `cache_dir`, built kernels are kept below it (PoCL too reads that only once a process).

        Raises:
            MzdError: ``device_lost``: no driver, no such device, or none with fine-grain shared memory.
        """
        os.environ.setdefault("POCL_AFFINITY", "1")
        if cache_dir is not None:
            os.environ.setdefault("POCL_CACHE_DIR", str(cache_dir / "pocl"))
        return cls(_select(_all_devices(), name), cache_dir=cache_dir)

    def reserve_svm(self, size_bytes: int) -> SvmReservation:
        """Allocate fine-grain shared memory that kernels may also reach through pointers in memory.

        Raises:
            MzdError: ``insufficient_memory``.
        """
        reservation = SvmReservation(self._context.int_ptr, size_bytes, self._forget)
        self._reservations[reservation.address] = reservation
        self._list_pointers()
        return reservation

    def allocate_scratch(self, size_bytes: int) -> ScratchBuffer:
        """Allocate zeroed shared memory for activations, tables and results.

        Raises:
            MzdError: ``insufficient_memory``.
        """
        return ScratchBuffer(self.reserve_svm(size_bytes))

    def build(self, source_name: str, **defines: Define) -> Program:
        """Build ``SOURCE_NAME.cl`` with ``-D`` for each of `defines`; the same request gets the same program.

        Raises:
            MzdError: ``internal`` with the compiler's log.
        """
        texts = (f"-D{key}={_define_text(value)}" for key, value in sorted(defines.items()))
        options = " ".join((_BUILD_OPTIONS, *texts))
        key = (source_name, options)
        if key not in self._programs:
            self._programs[key] = Program(self._build(source_name, options), source_name)
        return self._programs[key]

    def kernel(self, program: Program, name: str, *, follows_pointers: bool = False) -> BoundKernel:
        """Make a kernel object for one call site.

        Args:
            follows_pointers: the kernel reads or writes through addresses that it finds in memory, so the
                driver has to be told the allocations behind them.
        """
        pointers = (lambda: self._svm_pointers) if follows_pointers else None
        return BoundKernel(program.create_kernel(name), self._queue_handle, pointers)

    def flush(self) -> None:
        """Hand everything enqueued so far to the device."""
        check(libopencl().clFlush(self._queue_handle), "clFlush")

    def mark(self) -> cl.Event:
        """Return an event that completes when everything enqueued so far has, and flush."""
        try:
            event = cl.enqueue_marker(self._queue)
        except cl.Error as error:
            raise opencl_error(error.code, "clEnqueueMarkerWithWaitList") from error
        self.flush()
        return event

    async def wait(self, event: cl.Event) -> None:
        """Wait for an event of `mark`; see `EventWaiter.wait`.

        Raises:
            MzdError: the commands up to the event failed.

        Cancelled: returns only when the event is over, all the same.
        """
        await self._waiter.wait(event)

    def finish(self) -> None:
        """Block the calling thread (GIL released) until the queue is empty.

        Raises:
            MzdError: the commands failed.
        """
        try:
            self._queue.finish()
        except cl.Error as error:
            raise opencl_error(error.code, "clFinish") from error

    def close(self) -> None:
        """Wait for the queue and end the waiting thread. Reservations are their owners' to free."""
        self.finish()
        self._waiter.close()

    def _build(self, source_name: str, options: str) -> cl.Program:
        program = cl.Program(self._context, kernel_source(source_name))
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always")
            try:
                program.build(options, cache_dir=self._cache_dir)
            except cl.Error as error:
                raise MzdError(
                    "internal", f"building {source_name}.cl failed: {error}", options=options
                ) from error
        for remark in remarks:
            log.debug("building %s.cl (%s): %s", source_name, options, remark.message)
        return program

    def _forget(self, reservation: SvmReservation) -> None:
        del self._reservations[reservation.address]
        self._list_pointers()

    def _list_pointers(self) -> None:
        # A new array each time: kernels notice the change by its identity.
        self._svm_pointers = np.array(sorted(self._reservations), np.uint64)


def _all_devices() -> list[cl.Device]:
    """Return the devices of all platforms; a platform without one is skipped."""
    devices: list[cl.Device] = []
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise MzdError("device_lost", f"no OpenCL platform was found: {_INSTALL_HINT}") from error
    for platform in platforms:
        try:
            devices += platform.get_devices()
        except cl.Error as error:
            log.debug("platform %s has no devices: %s", platform.name, error)
    return devices


def _select(devices: list[cl.Device], name: str | None) -> cl.Device:
    """Choose the best of `devices` whose name contains `name`."""
    names = [device.name.strip() for device in devices]
    wanted = [device for device in devices if name is None or name.lower() in device.name.lower()]
    if not wanted:
        what = "no OpenCL device was found" if name is None else f"no OpenCL device is called {name!r}"
        raise MzdError("device_lost", f"{what}: {_INSTALL_HINT}", devices=names)
    usable = [device for device in wanted if _svm_level(device).startswith("fine")]
    if not usable:
        message = "no device has fine-grain shared memory, which units need"
        raise MzdError("device_lost", f"{message}: {_INSTALL_HINT}", devices=names)
    return max(usable, key=_preference)


def _preference(device: cl.Device) -> tuple[bool, bool, int]:
    """Rank: memory shared with the host first, then a GPU, then width."""
    is_gpu = bool(device.type & cl.device_type.GPU)
    return bool(device.host_unified_memory), is_gpu, device.max_compute_units


def _svm_level(device: cl.Device) -> str:
    """Name the best kind of shared memory that `device` offers."""
    try:
        capabilities: Any = device.svm_capabilities
    except cl.Error:  # OpenCL 1.2 does not know the question
        return "none"
    return next((name for bit, name in _SVM_LEVELS if capabilities & bit), "none")


def _define_text(value: Define) -> str:
    """Write a value as OpenCL C source; floats in full single precision."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value!r}f" if isinstance(value, float) else str(value)
