"""Owns the question whether a driver is told which allocations a kernel reaches through pointers in memory.

OpenCL asks for that list (clSetKernelExecInfo). Where each unit is an allocation it is long, and some drivers
pay for it at every launch: 0.7 to 0.9 us a pointer were measured on one that computes the same without it. So
a launch with a long list is timed when the device is opened. The list stays where it costs little; elsewhere
it is left out if a gather over fresh allocations is right without it.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mzd.device.allocations import Allocations
from mzd.device.kernel import BoundKernel
from mzd.device.kernel_object import KernelObject
from mzd.device.launch_queue import LaunchQueue
from mzd.device.libopencl import check, libopencl
from mzd.errors import MzdError

log = logging.getLogger(__name__)

NUM_POINTERS: Final = 256
"""Of the trial: enough that what a launch pays for them stands out."""

COST_NS_MAX: Final = 50.0
"""A pointer's share of a launch that is still cheap: the 1000 units of a long context then cost 0.05 ms."""

_UNIT_BYTES: Final = 4096
_LAUNCHES: Final = 16
_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class PointerLists:
    """Whether kernels get the list.

    Attributes:
        used: they do.
        cost_ns: what one pointer in the list adds to a launch; None: not measured.
        reason: one sentence.
    """

    used: bool
    cost_ns: float | None
    reason: str


NOT_NEEDED: Final = PointerLists(False, None, "kernels take buffers, whose addresses need no list")
SHORT: Final = PointerLists(True, None, "units lie in few large allocations, so the list is short")


def measure_pointer_lists(
    allocations: Allocations, queue_handle: int, make_gather: Callable[[], KernelObject]
) -> PointerLists:
    """Time launches with and without a list, and decide.

    Args:
        allocations: of shared memory, where each unit will be one.
        queue_handle: of the kernels' queue.
        make_gather: makes the kernel ``gather`` of addresses.cl.

    Raises:
        MzdError: ``insufficient_memory``, or as `decide`.
    """
    trial = _Trial(allocations, queue_handle, make_gather)
    try:
        decision = _decide(trial)
    finally:
        trial.free()
    log.info("pointer lists: used=%s cost_ns=%s reason=%s", decision.used, decision.cost_ns, decision.reason)
    return decision


def decide(cost_ns: float | None, right_without: Callable[[], bool]) -> PointerLists:
    """Keep the list where it is cheap, or where nothing else works.

    Args:
        cost_ns: what a pointer adds to a launch; None: the driver takes no list.
        right_without: tries whether kernels are right without it.

    Raises:
        MzdError: ``device_lost``: kernels are wrong with and without.
    """
    if cost_ns is not None and cost_ns <= COST_NS_MAX:
        return PointerLists(True, cost_ns, "a long list costs little")
    if right_without():
        dear = "the driver takes no list" if cost_ns is None else "a long list is dear"
        return PointerLists(False, cost_ns, f"{dear}, and kernels find fresh allocations without it")
    if cost_ns is None:
        raise MzdError(
            "device_lost", "the driver takes no list of pointers, and kernels are wrong without it"
        )
    return PointerLists(True, cost_ns, "a long list is dear, but kernels are wrong without it")


def _decide(trial: _Trial) -> PointerLists:
    try:
        cost_ns = trial.list_ns() / NUM_POINTERS
    except MzdError as error:
        log.debug("pointer lists: refused by the driver: %s", error)
        return decide(None, trial.is_right_without_list)
    return decide(round(cost_ns, 1), trial.is_right_without_list)


class _Trial:
    """Allocations with a mark in each, a table of their addresses, and the kernel that follows it."""

    def __init__(
        self, allocations: Allocations, queue_handle: int, make_gather: Callable[[], KernelObject]
    ) -> None:
        self._allocations = allocations
        self._queue_handle = queue_handle
        self._make_gather = make_gather
        self._units: list[int] = []
        self._table = allocations.allocate(NUM_POINTERS * 8)
        self._found = allocations.allocate(NUM_POINTERS * 4)
        self._renew(first_mark=0)

    def list_ns(self) -> float:
        """What the list adds to the shortest of some launches, their end included.

        Raises:
            MzdError: the driver refuses the list, or a launch.
        """
        kernels = self._gather(listed=True), self._gather(listed=False)
        rounds = [[self._launch_ns(kernel) for kernel in kernels] for _ in range(_LAUNCHES)]
        with_list_ns, without_ns = map(min, zip(*rounds, strict=True))
        return float(max(0, with_list_ns - without_ns))

    def _launch_ns(self, gather: BoundKernel) -> int:
        start_ns = time.perf_counter_ns()
        gather.enqueue((NUM_POINTERS,))
        check(libopencl().clFinish(self._queue_handle), "clFinish")
        return time.perf_counter_ns() - start_ns

    def is_right_without_list(self) -> bool:
        """Follow fresh allocations, several times; those of the round before are gone by then."""
        gather = self._gather(listed=False)
        for round_number in range(1, _ROUNDS + 1):
            first_mark = round_number * NUM_POINTERS
            self._renew(first_mark=first_mark)
            self._launch_ns(gather)
            if self._marks_found().tolist() != list(range(first_mark, first_mark + NUM_POINTERS)):
                return False
        return True

    def free(self) -> None:
        """Give everything back; the queue is empty."""
        self._allocations.free([*self._units, self._table, self._found])

    def _gather(self, *, listed: bool) -> BoundKernel:
        pointers = np.array(sorted((*self._units, self._table, self._found)), np.uint64)
        queue = LaunchQueue(self._queue_handle)
        gather = BoundKernel(self._make_gather(), queue, (lambda: pointers) if listed else None)
        gather.set_address(0, self._table)
        gather.set_address(1, self._found)
        gather.set_int(2, NUM_POINTERS)
        return gather

    def _renew(self, *, first_mark: int) -> None:
        """Replace the units by fresh ones, marked from `first_mark` on."""
        self._allocations.free(self._units)
        self._units = [self._allocations.allocate(_UNIT_BYTES) for _ in range(NUM_POINTERS)]
        for mark, address in enumerate(self._units, start=first_mark):
            self._write(address, np.array([mark], np.uint32))
        self._write(self._table, np.array(self._units, np.uint64))

    def _write(self, address: int, values: NDArray[np.generic]) -> None:
        host_address = self._allocations.map(address, values.nbytes, write=True)
        ctypes.memmove(host_address, values.ctypes.data, values.nbytes)
        self._allocations.unmap(address, host_address)

    def _marks_found(self) -> NDArray[np.uint32]:
        found = np.zeros(NUM_POINTERS, np.uint32)
        host_address = self._allocations.map(self._found, found.nbytes, write=False)
        ctypes.memmove(found.ctypes.data, host_address, found.nbytes)
        self._allocations.unmap(self._found, host_address)
        return found
