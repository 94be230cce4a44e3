"""Owns the device's own addresses of buffers: asks for them, and proves that they may be relied on.

OpenCL does not promise that a buffer has one address that stays; drivers with memory of their own behave so.
"""

from __future__ import annotations

import ctypes
import threading
import warnings

import numpy as np
import pyopencl as cl

from mzd.device.libopencl import NO_EVENTS, check, libopencl
from mzd.errors import MzdError

_NUM_TRIALS = 48
_TRIAL_BYTES = 4096


class BufferAddresses:
    """Asks the device, with a kernel of one work-item, where a buffer lies. Thread-safe.

    Args:
        program: addresses.cl, built.
        queue_handle: of the queue for copies; the kernel is enqueued there.
    """

    def __init__(self, context: cl.Context, program: cl.Program, queue_handle: int) -> None:
        self._queue = queue_handle
        self._lock = threading.Lock()
        self._table = cl.Buffer(context, cl.mem_flags.READ_WRITE, 8)
        self._kernel = cl.Kernel(program, "address_of")
        self._one = (ctypes.c_size_t * 1)(1)
        self._set(1, ctypes.c_void_p(self._table.int_ptr))
        self._set(2, ctypes.c_int32(0))

    def __call__(self, handle: int) -> int:
        """Return the address of the ``cl_mem`` of `handle`; blocks for one launch.

        Raises:
            MzdError: the launch failed.
        """
        library = libopencl()
        address = ctypes.c_uint64()
        with self._lock:
            self._set(0, ctypes.c_void_p(handle))
            check(
                library.clEnqueueNDRangeKernel(
                    self._queue, self._kernel.int_ptr, 1, None, self._one, None, *NO_EVENTS
                ),
                "clEnqueueNDRangeKernel(address_of)",
            )
            status = library.clEnqueueReadBuffer(
                self._queue, self._table.int_ptr, 1, 0, 8, ctypes.byref(address), *NO_EVENTS
            )
            check(status, "clEnqueueReadBuffer")
        return address.value

    def _set(self, index: int, value: ctypes.c_void_p | ctypes.c_int32) -> None:
        status = libopencl().clSetKernelArg(
            self._kernel.int_ptr, index, ctypes.sizeof(value), ctypes.byref(value)
        )
        check(status, "clSetKernelArg(address_of)")


def check_addresses(context: cl.Context, queue: cl.CommandQueue, program: cl.Program) -> None:
    """Follow the addresses of many buffers, none of them an argument, before and after others went.

    Raises:
        MzdError: ``device_lost``: an address is not where its buffer is, or did not stay.
    """
    ask = BufferAddresses(context, program, queue.int_ptr)
    try:
        buffers = [_marked_buffer(context, queue, i) for i in range(_NUM_TRIALS)]
        addresses = [ask(buffer.int_ptr) for buffer in buffers]
        _expect(context, queue, program, addresses, range(_NUM_TRIALS))
        for buffer in buffers[1::2]:
            buffer.release()
        others = [_marked_buffer(context, queue, 1000 + i) for i in range(_NUM_TRIALS)]
        _expect(context, queue, program, addresses[::2], range(0, _NUM_TRIALS, 2))
        if [ask(buffer.int_ptr) for buffer in buffers[::2]] != addresses[::2]:
            raise _unreliable("moved")
        for buffer in others:
            buffer.release()
    except cl.Error as error:
        raise _unreliable(f"cannot be followed ({error})") from error


def _marked_buffer(context: cl.Context, queue: cl.CommandQueue, mark: int) -> cl.Buffer:
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE, _TRIAL_BYTES)
    cl.enqueue_fill_buffer(queue, buffer, np.array([mark], np.uint32), 0, _TRIAL_BYTES)
    return buffer


def _expect(
    context: cl.Context, queue: cl.CommandQueue, program: cl.Program, addresses: list[int], marks: range
) -> None:
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    table = cl.Buffer(context, flags, hostbuf=np.array(addresses, np.uint64))
    found = np.zeros(len(addresses), np.uint32)
    out = cl.Buffer(context, flags, hostbuf=found)
    gather = cl.Kernel(program, "gather")
    gather.set_args(table, out, np.int32(len(addresses)))
    cl.enqueue_nd_range_kernel(queue, gather, (len(addresses),), None)
    cl.enqueue_copy(queue, found, out)
    if found.tolist() != list(marks):
        raise _unreliable("do not lead to the buffers")


def _unreliable(what: str) -> MzdError:
    return MzdError("device_lost", f"the device's addresses of buffers {what}: other memory must be used")


def address_program(context: cl.Context, source: str) -> cl.Program:
    """Build addresses.cl.

    Raises:
        MzdError: ``device_lost``: it does not build, for a device with 32-bit addresses, say.
    """
    try:
        program = cl.Program(context, source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # some compilers speak of every build
            program.build()
        return program
    except cl.Error as error:
        raise _unreliable(f"cannot be asked for ({error})") from error
