"""Owns the OpenCL device: its context, its one in-order queue, its programs and its shared memory."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyopencl as cl
from numpy.typing import NDArray

from mzd.device.allocations import Allocations, BufferAllocations, SvmAllocations
from mzd.device.buffer_addresses import BufferAddresses, address_program, check_addresses
from mzd.device.kernel import BoundKernel
from mzd.device.kernel_object import KernelObject
from mzd.device.launch_log import LaunchLog
from mzd.device.launch_queue import LaunchQueue
from mzd.device.libopencl import check, libopencl, opencl_error
from mzd.device.pinned_memory import PinnedMemory
from mzd.device.places import BufferMap
from mzd.device.pointer_lists import NOT_NEEDED, SHORT, PointerLists, measure_pointer_lists
from mzd.device.scratch import MirroredScratch, ScratchBuffer, SharedScratch
from mzd.device.selection import Candidate, KernelClass, MemoryKind, candidates, svm_level
from mzd.device.svm import SvmReservation
from mzd.device.waiter import EventWaiter
from mzd.errors import MzdError
from mzd.kernels import kernel_source

log = logging.getLogger(__name__)

_BUILD_OPTIONS = "-cl-denorms-are-zero -w"
"""On x86 a denormal result costs some 150 cycles, and the softmax of a head whose scores lie far apart is
full of them: attention took 19 times as long. ``-w`` because PoCL prints the number of warnings, such as of a
loop not unrolled, on our stderr; what is wrong with a kernel shows in the self-test."""

RESERVATION_BYTES = 1 << 30
"""Large buffers fail on drivers that announce them; 1 GiB is taken everywhere."""

Define = int | float | str


class Program:
    """A built program; kernels come from `OpenClDevice.kernel`."""

    def __init__(self, program: cl.Program, source_name: str) -> None:
        self._program = program
        self._source_name = source_name

    def create_kernel(self, name: str) -> KernelObject:
        """Return a new kernel object: each call site has its own, with its own arguments."""
        return KernelObject(self._program.int_ptr, name, source_name=self._source_name)


class OpenClDevice:
    """One device with one in-order queue for kernels and one for copies. Made by `open`; `close` ends it.

    Attributes:
        name, driver: as the driver says them.
        compute_units: cores of a CPU, or a GPU's equivalent.
        work_group_max, local_memory_bytes: the most work-items of a work-group, and memory that they share.
        svm_level: ``none``, ``coarse_buffer``, ``fine_buffer`` or ``fine_system``.
        unified_memory: whether host and device share their memory.
        memory_kind: how units lie in it; see `MemoryKind`.
        kernel_class: which kernels are built; see `KernelClass`.
        owns_host_pages: its shared memory is ordinary pages of this process, to be given back one by one.
        reservation_bytes_max: the longest piece of shared memory to reserve at once.
        float_lanes: floats of the vectors that suit the device, 8 or 16.
        allocations: memory of `memory_kind`, an allocation a unit.
        launches: the device's own times of launches, where it was opened to keep them.
        kernel_queue: where kernels are enqueued.
        pointer_lists: whether the driver is told of allocations behind pointers in memory.

    Raises:
        MzdError: ``device_lost``: the device cannot hold units in that kind of memory.
    """

    def __init__(self, candidate: Candidate, *, cache_dir: Path | None, keeps_times: bool = False) -> None:
        device = candidate.device
        self.name: str = candidate.name
        self.driver: str = f"{device.platform.name.strip()} {device.driver_version.strip()}"
        self.compute_units: int = device.max_compute_units
        self.work_group_max: int = device.max_work_group_size
        self.local_memory_bytes: int = device.local_mem_size
        self.svm_level = svm_level(device)
        self.unified_memory = bool(device.host_unified_memory)
        self.memory_kind: MemoryKind = candidate.memory_kind
        self.kernel_class: KernelClass = candidate.kernel_class
        is_cpu = bool(device.type & cl.device_type.CPU)
        self.owns_host_pages = is_cpu and self.memory_kind == "fine_svm"
        self.float_lanes = 16 if device.native_vector_width_float >= 16 else 8
        self._cache_dir = None if cache_dir is None else str(cache_dir)
        self.reservation_bytes_max = int(min(device.max_mem_alloc_size, RESERVATION_BYTES))
        self._context = cl.Context([device])
        self.launches = LaunchLog() if keeps_times else None
        self._queue = _open_queue(self._context, device, keeps_times=keeps_times)
        self._queue_handle: int = self._queue.int_ptr
        self._copies = cl.CommandQueue(self._context, device)
        self._programs: dict[tuple[str, str], Program] = {}
        self._reservations: dict[int, SvmReservation] = {}
        self._unit_pointers: Sequence[int] = ()
        self._svm_pointers: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._pointers_changed = False
        self._buffers = BufferMap() if self.memory_kind in ("staged", "buffers") else None
        self.kernel_queue = LaunchQueue(self._queue_handle, self._buffers, self.launches)
        self.allocations: Allocations = self._open_allocations()
        self.pointer_lists = self._decide_pointer_lists()
        self._waiter = EventWaiter(self.name)

    @classmethod
    def open(
        cls,
        name: str | None = None,
        *,
        memory_kind: MemoryKind | None = None,
        kernel_class: KernelClass | None = None,
        cache_dir: Path | None = None,
        keeps_times: bool = False,
    ) -> OpenClDevice:
        """Open the device whose name contains `name` (case ignored), or without a name the best one.

        With `memory_kind` or `kernel_class` that is used instead of what suits the device. With `cache_dir`,
        built kernels are kept below it (PoCL too reads that only once a process). With `keeps_times` the
        device notes when launches begin and end, which costs each of them a little.

        Raises:
            MzdError: ``device_lost``: no driver, no such device, or none with that memory.
        """
        prepare_environment(cache_dir)
        failure: MzdError | None = None
        for candidate in candidates(name, memory_kind, kernel_class):
            try:
                return cls(candidate, cache_dir=cache_dir, keeps_times=keeps_times)
            except MzdError as error:
                log.warning(
                    "%s is not used with the memory %s: %s", candidate.name, candidate.memory_kind, error
                )
                failure = failure or error
        assert failure is not None  # there is a candidate, or `candidates` raises
        raise failure

    def reserve_svm(self, size_bytes: int) -> SvmReservation:
        """Allocate fine-grain shared memory that kernels may also reach through pointers in memory.

        Raises:
            MzdError: ``insufficient_memory``.
        """
        reservation = SvmReservation(self._context.int_ptr, size_bytes, self._forget)
        self._reservations[reservation.address] = reservation
        self._pointers_changed = True
        return reservation

    def allocate_scratch(self, size_bytes: int) -> ScratchBuffer:
        """Allocate zeroed shared memory for activations, tables and results.

        Raises:
            MzdError: ``insufficient_memory``.
        """
        if self.memory_kind == "fine_svm":
            return SharedScratch(self.reserve_svm(size_bytes))
        return MirroredScratch(self.allocations, self._queue_handle, size_bytes)

    def pin_host_memory(self, size_bytes: int) -> PinnedMemory:
        """Allocate host memory that copies to and from the device run from at full speed.

        Raises:
            MzdError: ``insufficient_memory``.
        """
        return PinnedMemory(self._context.int_ptr, self._copies.int_ptr, size_bytes)

    def build(self, source_name: str, **defines: Define) -> Program:
        """Build ``SOURCE_NAME.cl`` with ``-D`` for each of `defines`; the same request gets the same program.

        Raises:
            MzdError: ``internal`` with the compiler's log.
        """
        texts = (f"-D{key}={_define_text(value)}" for key, value in sorted(defines.items()))
        places = () if self._buffers is None else ("-DBUFFER_PLACES",)
        options = " ".join((_BUILD_OPTIONS, *places, *texts))
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
        pointers = self._list_pointers if follows_pointers and self.pointer_lists.used else None
        return BoundKernel(program.create_kernel(name), self.kernel_queue, pointers)

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
                name = opencl_error(error.code, "clBuildProgram").data["opencl_error"]
                raise MzdError(
                    "internal",
                    f"building {source_name}.cl failed: {error}",
                    options=options,
                    opencl_error=name,
                ) from error
        for remark in remarks:
            log.debug("building %s.cl (%s): %s", source_name, options, remark.message)
        return program

    def _open_allocations(self) -> Allocations:
        handles = self._context.int_ptr, self._copies.int_ptr
        if self._buffers is None:
            fine = self.memory_kind == "fine_svm"
            return SvmAllocations(*handles, fine=fine, changed=self._note_units)
        if self.memory_kind == "buffers":
            return BufferAllocations(*handles, self._buffers, None)
        program = address_program(self._context, kernel_source("addresses"))
        check_addresses(self._context, self._copies, program)
        ask = BufferAddresses(self._context, program, self._copies.int_ptr)
        return BufferAllocations(*handles, self._buffers, ask)

    def _decide_pointer_lists(self) -> PointerLists:
        if self._buffers is not None:
            return NOT_NEEDED
        if self.owns_host_pages:
            return SHORT
        program = self.build("addresses")
        return measure_pointer_lists(
            self.allocations, self._queue_handle, lambda: program.create_kernel("gather")
        )

    def _note_units(self, pointers: Sequence[int]) -> None:
        self._unit_pointers = pointers
        self._pointers_changed = True

    def _forget(self, reservation: SvmReservation) -> None:
        del self._reservations[reservation.address]
        self._pointers_changed = True

    def _list_pointers(self) -> NDArray[np.uint64]:
        """All shared allocations, in a new array after each change: kernels notice that by its identity."""
        if self._pointers_changed:
            self._pointers_changed = False  # first: another thread may change it again meanwhile
            self._svm_pointers = np.array(sorted((*self._reservations, *self._unit_pointers)), np.uint64)
        return self._svm_pointers


def _open_queue(context: cl.Context, device: cl.Device, *, keeps_times: bool) -> cl.CommandQueue:
    """Open the kernels' queue."""
    if not keeps_times:
        return cl.CommandQueue(context, device)
    return cl.CommandQueue(context, device, properties=cl.command_queue_properties.PROFILING_ENABLE)


def prepare_environment(cache_dir: Path | None) -> None:
    """Tell PoCL what it reads once a process, when its platform loads, unless the environment says otherwise.

    With its workers pinned (``POCL_AFFINITY``) a small matrix takes two thirds of the time.
    """
    os.environ.setdefault("POCL_AFFINITY", "1")
    if cache_dir is not None:
        os.environ.setdefault("POCL_CACHE_DIR", str(cache_dir / "pocl"))


def _define_text(value: Define) -> str:
    """Write a value as OpenCL C source; floats in full single precision."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value!r}f" if isinstance(value, float) else str(value)
