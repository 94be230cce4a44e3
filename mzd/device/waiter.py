"""Owns the thread that waits for a queue's events, so that Trio never does."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from queue import SimpleQueue

import pyopencl as cl
import trio

from mzd.device.libopencl import opencl_error
from mzd.errors import MzdError


@dataclass(slots=True)
class _Wait:
    """One waiting task: woken through an eventfd, with the error that the event ended in, if any."""

    event: cl.Event
    eventfd: int
    error: MzdError | None = None

    def block(self) -> None:
        """Wait on the calling thread, with the GIL released, then wake the task."""
        try:
            self.event.wait()
        except cl.Error as error:
            self.error = opencl_error(error.code, "clWaitForEvents")
        os.eventfd_write(self.eventfd, 1)


class EventWaiter:
    """Waits for events of ONE in-order queue, in the order in which they were enqueued.

    One thread is enough there, because an event never ends before an earlier one. pyopencl's own callbacks
    start a thread each, hence this one.

    Tasks wait for an eventfd each, kept for the next. Through `TrioToken.run_sync_soon` and a shielded
    `trio.Event` the way back from the device to the task took more than twice as long, 0.2 ms more a token.
    """

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[_Wait | None] = SimpleQueue()
        self._idle_eventfds: list[int] = []
        self._thread = threading.Thread(target=self._run, name=f"wait-{name}", daemon=True)
        self._thread.start()

    async def wait(self, event: cl.Event) -> None:
        """Return when `event` has completed.

        Raises:
            MzdError: the commands up to the event failed.

        Cancelled: still waits for the event first. A kernel cannot be recalled, and who cancels is about
            to release what it reads.
        """
        idle = self._idle_eventfds
        wait = _Wait(event, idle.pop() if idle else os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._inbox.put(wait)
        await _until_written(wait.eventfd)
        idle.append(wait.eventfd)
        if wait.error is not None:
            raise wait.error
        await trio.lowlevel.checkpoint_if_cancelled()

    def close(self) -> None:
        """End the thread after the waits that it has taken."""
        self._inbox.put(None)
        self._thread.join()
        while self._idle_eventfds:
            os.close(self._idle_eventfds.pop())

    def _run(self) -> None:
        while (wait := self._inbox.get()) is not None:
            wait.block()


async def _until_written(eventfd: int) -> None:
    """Wait whatever happens, and reset it. A cancellation is seen at the caller's next checkpoint."""
    try:
        await trio.lowlevel.wait_readable(eventfd)
    except trio.Cancelled:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.wait_readable(eventfd)
    os.eventfd_read(eventfd)
